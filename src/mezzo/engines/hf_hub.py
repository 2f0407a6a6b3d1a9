"""Find a Hugging Face model: bundled, in a local folder, or on the hub; its configuration and tokenizer, not its weights."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from mezzo.engines.architectures import positions_follow_padding
from mezzo.engines.panics import caught_panics
from mezzo.errors import ModelError, nearest
from mezzo.untrusted import parse_json, printable, read_bytes

if TYPE_CHECKING:  # it imports NumPy, and reading options must be quick
    from mezzo.types import Family

# What the names of bundled models begin with, and their folder.
BUNDLED, MODELS = "mezzo/", resources.files("mezzo") / "bundled" / "models"
# Files of which a tokenizer has one, whoever wrote it.
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab*", "*.model", "*.tiktoken")
# Bytes of a JSON file; the largest are vocabularies.
MAX_JSON = 2**28


def bundled_models() -> tuple[str, ...]:
    return tuple(sorted(BUNDLED + entry.name for entry in MODELS.iterdir() if (entry / "config.json").is_file()))


def locate(name: str) -> str:
    """The folder of a model that is bundled, local or in the hub's cache; another hub name as it is."""
    if name.startswith(BUNDLED):
        if name not in bundled_models():
            known = ", ".join(bundled_models())
            raise ModelError(f"there is no bundled model {name!r}{nearest(name, bundled_models())} (bundled: {known})")
        return str(MODELS / name.removeprefix(BUNDLED))
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(
                f"{name} is a folder without a config.json: a model folder as save_pretrained writes it is needed"
            )
        _refuse_strange_files(Path(name))
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"no folder {name}: pass an existing model folder, a hub name, or one of {', '.join(bundled_models())}"
        )
    return _cached_folder(name) or name


def _refuse_strange_files(folder: Path) -> None:
    """The loaders of transformers would wait for a pipe for ever, and read a file of any size."""
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ModelError(f"{file} is not a file; a model folder holds files only")
        if file.suffix == ".json" and file.is_file() and file.stat().st_size > MAX_JSON:
            raise ModelError(f"{file} has more than {MAX_JSON:,} bytes, which no model needs")
    for index in folder.glob("*.index.json"):
        _refuse_strange_parts(index)
    for file in (folder / "additional_chat_templates").glob("*"):
        if not file.is_file():
            raise ModelError(f"{file} is not a file; this folder holds templates only")


def _refuse_strange_parts(index: Path) -> None:
    """The index of weights in several files may name pipes, and files of other folders. What else is wrong with it, the loader
    says."""
    try:
        parts = set(map(str, parse_json(read_bytes(index, MAX_JSON))["weight_map"].values()))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return
    for part in sorted(parts):
        file = index.parent / part
        if Path(part).is_absolute() or ".." in Path(part).parts or (file.exists() and not file.is_file()):
            raise ModelError(f"{index} names {part!r}, which is not a file in this folder")


def needs_hub(name: str) -> bool:
    """Whether this is the hub name of a model that is not on this machine yet."""
    try:
        return not os.path.isdir(locate(name))
    except ModelError:
        return False  # it is refused as it is


def _cached_folder(name: str) -> str | None:
    """Where the hub's cache has a complete model: the hub need not know that it is used."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
        folder = Path(config if isinstance(config, str) else os.devnull).parent
        index = folder / "model.safetensors.index.json"
        parts = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
        complete = all((folder / part).is_file() for part in parts) and _has_tokenizer(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not a hub name, or a damaged cache
        return None
    return str(folder) if complete else None


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)


def load_config(name: str, remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    with quiet():
        config = fetched(
            name, lambda path, **how: AutoConfig.from_pretrained(path, trust_remote_code=remote_code, **how)
        )
    if "/" in str(asked := getattr(config, "_attn_implementation", None)) and not remote_code:
        raise ModelError(f"{name} asks for attention code from the hub ({asked}), which runs only with --remote-code")
    if "/" in str(weights := getattr(config, "transformers_weights", None)):  # its folder was not looked at
        raise ModelError(f"{name} has its weights in {str(weights)!r}; put them beside its config.json")
    return config


def load_tokenizer(name: str, remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    def tried(path: str, **how: Any) -> Any:
        bare = os.path.isdir(path) and not _has_tokenizer(Path(path))
        try:
            with caught_panics():
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=remote_code, **how)
                tokenizer.decode(tokenizer("A text.")["input_ids"])  # broken settings show only when it is used
            if bare and len(tokenizer) <= len(tokenizer.added_tokens_decoder):
                raise ValueError("a tokenizer of special tokens alone, which transformers makes up")
        except Exception:
            if not bare:
                raise
            raise ModelError(
                f"{name} is a folder without a tokenizer; put the files of the model's own tokenizer there, "
                "as tokenizer.save_pretrained writes them"
            ) from None
        return tokenizer

    with quiet():
        return fetched(name, tried)


def family_of(config: Any) -> Family:
    """Whether a checkpoint is a masked or a causal language model, by the head it was saved with, then by its type."""
    from transformers.models.auto import modeling_auto

    refuse_pairs(config)
    if family := _family_of_head(getattr(config, "architectures", None)):
        return family
    if config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "masked"
    if config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "causal"
    raise ModelError(f"models of type {config.model_type!r} are neither masked nor causal language models")


def stated_family(name: str) -> Family | None:
    """The family of a model on this machine by its config.json alone, without transformers; None where it does not say."""
    try:
        settings = json.loads((Path(locate(name)) / "config.json").read_bytes()[:MAX_JSON])
        return _family_of_head(settings.get("architectures"))
    except (OSError, ValueError, RecursionError, AttributeError, ModelError):
        return None


def _family_of_head(architectures: Any) -> Family | None:
    for architecture in map(str, architectures if isinstance(architectures, (list, tuple)) else ()):
        if "MaskedLM" in architecture:
            return "masked"
        if "CausalLM" in architecture or "LMHeadModel" in architecture:
            return "causal"
    return None


def refuse_pairs(config: Any) -> None:
    """An encoder with a decoder has two inputs and no one place to read label words at."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"models of type {config.model_type!r} pair an encoder with a decoder; mezzo trains masked language models "
            "(such as RoBERTa) and causal ones (such as Llama)"
        )


def longest_input(config: Any) -> int | None:
    """Tokens that the model has positions for; RoBERTa and its kin begin to count behind the padding token."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    if not positions_follow_padding(config):
        return limit
    if not isinstance(config.pad_token_id, int):
        raise ModelError(
            f"a {config.model_type} model counts positions from its pad_token_id; its config.json has none"
        )
    return limit - config.pad_token_id - 1


def fetched(name: str, load: Callable[..., Any]) -> Any:
    """What `load(path, local_files_only=…)` makes of the model's folder or hub name; failures in one line."""
    path = locate(name)
    local = os.path.isdir(path)
    try:
        return load(path, local_files_only=local or not _hub_answers())
    except ModelError:
        raise
    except Exception as error:  # broken files make the loaders raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if local:
            raise ModelError(f"{name} cannot be loaded: {first}") from None
        failure = f"did not provide it ({first[:160]})" if _hub_answers() else "cannot be reached"
        raise ModelError(
            f"model {name!r} cannot be loaded: it is neither bundled nor a local folder, and the model hub {failure}. "
            f"Pass a local folder; where there is a network, 'hf download {name} --local-dir DIR' makes one"
        ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without its own messages and bars; what matters is said by us. Its errors, which may quote a model's files,
    are one line that a terminal does not obey."""
    import transformers

    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(_make_harmless)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_make_harmless)
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _make_harmless(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(" ".join(record.getMessage().split("\n"))), ()
    return True


@cache
def _hub_answers() -> bool:
    """One short try; the hub's own client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    port = address.port or {"http": 80}.get(address.scheme, 443)
    try:
        socket.create_connection((address.hostname, port), timeout=5).close()
    except OSError:
        # Behind a proxy the hub may be reached although a direct connection is not possible.
        return bool(getproxies())
    return True
