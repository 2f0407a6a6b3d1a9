"""Every reach into SGLang beyond its public interface. They depend on its version.

At start an engine in process checks them against SGLang's own ways to the same scores; where they fail it uses those
(`inprocess.engine`). Beside a server they answer mezzo's clients, which do without where they get no answer.
"""
