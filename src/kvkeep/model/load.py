"""Models by name: the default one out of a PyPI wheel, any other from the hub or a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvkeep.arguments import check_value
from kvkeep.errors import BadParameter, ModelUnavailable
from kvkeep.model.default_model import (
    CONTEXT_LENGTH,
    DEFAULT,
    WHEEL,
    Say,
    check_tokenizer,
    default_folder,
    fetch_default,
)
from kvkeep.model.missing_packages import causes, first_line, missing_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_NAMES = ("default", DEFAULT)
DTYPES = ("float32", "bfloat16", "float16", "auto")


@dataclass(frozen=True)
class KnownModel:
    """A model kvkeep can fetch by itself."""

    name: str
    parameters: str
    context_length: int
    license: str
    source: str
    folder: Path

    @property
    def on_disk(self) -> bool:
        return self.folder.is_dir()


def known_models() -> list[KnownModel]:
    return [KnownModel(DEFAULT, "135M", CONTEXT_LENGTH, "Apache-2.0", f"PyPI wheel {WHEEL}", default_folder())]


def load(
    name: str | None = None,
    *,
    device: Any = None,
    dtype: Any = None,
    progress: Say | None = None,
    tp_plan: Literal["auto"] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, ready to generate.

    name: None or "default" for the default model, else a hub id or a local folder.
    dtype: float32 on CPU unless given; elsewhere what the model was saved in.
    progress: called with one line of text at each step.
    tp_plan: "auto" splits it over the processes of torch.distributed, each with a device of its own; None: one process.
    """
    check_value("name", name, str | None)
    check_value("progress", progress, Callable | None)
    check_value("tp_plan", tp_plan, Literal["auto"] | None)
    say = progress or (lambda text: None)
    device, dtype = check_device(device, dtype)
    name = DEFAULT if name is None else name
    source = _source(name, say)
    say(f"loading {DEFAULT if name in DEFAULT_NAMES else name}")
    try:
        with _progress_bar(name not in DEFAULT_NAMES):
            model, tokenizer = _from_pretrained(source, dtype, tp_plan)
    except Exception as error:  # transformers and its dependencies raise many types
        raise ModelUnavailable(_why(name, source, error)) from error
    if name in DEFAULT_NAMES:
        check_tokenizer(tokenizer, source)
    return model if tp_plan else model.to(device), tokenizer


def load_tokenizer(name: str | None = None, progress: Say | None = None) -> Any:
    """A model's tokenizer alone."""
    from transformers import AutoTokenizer

    return _load_part(AutoTokenizer, name, progress)


def load_config(name: str | None = None) -> Any:
    from transformers import AutoConfig

    return _load_part(AutoConfig, name)


def load_context_length(name: str | None = None) -> int:
    """Tokens a model was trained for, from its config alone."""
    from kvkeep.model.hf_cache import config_context_length

    return config_context_length(load_config(name))


def _load_part(kind: Any, name: str | None, progress: Say | None = None) -> Any:
    """A config or tokenizer, without the model's weights."""
    name = DEFAULT if name is None else name
    source = _source(name, progress)
    try:
        return kind.from_pretrained(source)
    except Exception as error:  # transformers and its dependencies raise many types
        raise ModelUnavailable(_why(name, source, error)) from error


@contextmanager
def _progress_bar(is_shown: bool) -> Iterator[None]:
    """transformers' own: of a model that takes a second it is noise."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if not is_shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def quiet_transformers() -> None:
    """Silence transformers' warnings and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_device(device: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """The device and dtype of a model, checked before anything is fetched."""
    device = _device(device)
    return device, _dtype(dtype, device)


def _device(device: Any) -> Any:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(". ")
        unknown = reason.startswith(("Expected one of", "device()"))
        reason = "torch knows no such device" if unknown else reason
        raise BadParameter(f"device={device!r} cannot be used here ({reason}); use 'cpu', or leave it out.") from error
    if found.type == "meta":
        raise BadParameter("device='meta' holds no values, so nothing can be computed; use 'cpu', or leave it out.")
    return found


def _dtype(dtype: Any, device: Any) -> Any:
    import torch

    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise BadParameter(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _source(name: str, say: Say | None) -> str:
    """A folder or a hub id; the default model is fetched first."""
    if name in DEFAULT_NAMES:
        return str(fetch_default(say))
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise ModelUnavailable(f"no model folder at {name!r}; give a folder with a config.json in it, or a hub id.")
    return name


def _from_pretrained(source: str, dtype: Any, tp_plan: Literal["auto"] | None = None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    how: dict[str, Any] = {}
    if tp_plan:
        from torch import distributed
        from transformers.distributed import DistributedConfig

        size = distributed.get_world_size() if distributed.is_initialized() else None  # None: as torchrun says
        how = {"distributed_config": DistributedConfig(tp_size=size, tp_plan=tp_plan)}
    tokenizer = AutoTokenizer.from_pretrained(source)
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **how), tokenizer


def _why(name: str, source: str, error: BaseException) -> str:
    """Why a model could not be loaded, and what to do: from the errors transformers wraps."""
    if reason := missing_package(error):
        return f"the model {name!r} could not be loaded: {reason}"
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
