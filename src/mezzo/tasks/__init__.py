"""Tasks: what to ask a model about a row of data. Templates, label words, data loading, sampling and encoding.

A task is data. `get_task` finds one, `load_examples` reads rows for it, `Encoder` turns rows into prompts.
"""

from mezzo.tasks.encoder import Encoder
from mezzo.tasks.loading import bundled_data, find_split, has_splits, is_k_shot, load_examples, load_rows, name_split
from mezzo.tasks.registry import get_task, list_tasks
from mezzo.tasks.sampling import k_shot
from mezzo.tasks.task import MLMConfig, Task

__all__ = [
    "Encoder",
    "MLMConfig",
    "Task",
    "bundled_data",
    "find_split",
    "get_task",
    "has_splits",
    "is_k_shot",
    "k_shot",
    "list_tasks",
    "load_examples",
    "load_rows",
    "name_split",
]
