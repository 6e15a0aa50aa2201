"""Models by name: the default one out of a PyPI wheel, any other from the hub or a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvkeep.arguments import check_value
from kvkeep.errors import BadParameter, ModelUnavailable
from kvkeep.model.default_model import DEFAULT, KNOWN_MODELS, Say, check_tokenizer, default_folder, fetch_default
from kvkeep.model.missing_packages import causes, first_line, missing_package
from kvkeep.registry import did_you_mean
from kvkeep.terminal import Bar, is_watched

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_NAMES = ("default", DEFAULT)
DTYPES = ("float32", "bfloat16", "float16", "auto")
HUB_TIMEOUT_S = 5  # for the hub to say that it is there


def load(
    name: str | None = None,
    *,
    device: Any = None,
    dtype: Any = None,
    progress: Say | bool | None = None,
    tp_plan: Literal["auto"] | None = None,
    yarn: float | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, ready to generate.

    name: None or "default" for the default model, else a hub id or a local folder.
    dtype: float32 on CPU unless given; elsewhere what the model was saved in.
    progress: called with one line of text at each step; None: a bar on a terminal; False: no bar.
    tp_plan: "auto" splits it over the processes of torch.distributed, each with a device of its own; None: one process.
    yarn: a factor by which YaRN lengthens the model's context length; None: as it was saved.
    """
    check_value("name", name, str | None)
    check_value("progress", progress, Callable | bool | None)
    check_value("tp_plan", tp_plan, Literal["auto"] | None)
    device, dtype = check_device(device, dtype)
    name = DEFAULT if name is None else name
    is_default = name in DEFAULT_NAMES
    with _told(progress, is_default) as say:
        source = _source(name, say)
        say(f"loading {DEFAULT if is_default else name}")
        try:
            with _progress_bar(not is_default and progress is not False and is_watched()):
                model, tokenizer = _from_pretrained(source, dtype, tp_plan, yarn)
        except BadParameter:
            raise
        except Exception as error:  # transformers and its dependencies raise many types
            raise ModelUnavailable(_why(name, source, error)) from error
        if is_default:
            check_tokenizer(tokenizer, source)
    return model if tp_plan else model.to(device), tokenizer


def check_name(name: str) -> None:
    """Refuse a model that is neither on this machine nor on a hub that can be reached. This imports nothing heavy."""
    if name in DEFAULT_NAMES:
        return
    source = _source(name, None)
    if _from_where(source):
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(source, "config.json"), str):
            raise ModelUnavailable(_unreachable(name))


def load_tokenizer(name: str | None = None, progress: Say | None = None) -> Any:
    """A model's tokenizer alone."""
    from transformers import AutoTokenizer

    return _load_part(AutoTokenizer, name, progress)


def load_config(name: str | None = None) -> Any:
    from transformers import AutoConfig

    return _load_part(AutoConfig, name)


def load_context_length(name: str | None = None, yarn: float | None = None) -> int:
    """Tokens a model was trained for, from its config alone; see `load` for yarn."""
    from kvkeep.model.hf_cache import config_context_length

    config = load_config(name)
    return config_context_length(_with_yarn(config, yarn) if yarn else config)


def _with_yarn(config: Any, factor: float) -> Any:
    """Lengthen the context length by a factor, with YaRN's frequencies (arXiv:2309.00071). config is changed."""
    part = config.get_text_config(decoder=True)
    rope = getattr(part, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default":
        raise BadParameter(
            f"yarn={factor:g} lengthens models of plain RoPE; this one ({config.model_type}) has "
            f"{rope.get('rope_type') or 'none for all its layers'}. Leave yarn out."
        )
    if factor < 1:
        raise BadParameter(f"yarn={factor:g} would shorten the context length; use 1 or more.")
    trained = part.max_position_embeddings
    more = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained}
    part.rope_parameters = {**rope, **more}
    part.max_position_embeddings = int(factor * trained)
    return config


def _load_part(kind: Any, name: str | None, progress: Say | None = None) -> Any:
    """A config or tokenizer, without the model's weights."""
    name = DEFAULT if name is None else name
    source = _source(name, progress)
    try:
        return kind.from_pretrained(source, **_from_where(source))
    except Exception as error:  # transformers and its dependencies raise many types
        raise ModelUnavailable(_why(name, source, error)) from error


@contextmanager
def _told(progress: Say | bool | None, is_default: bool) -> Iterator[Say]:
    """Give what is told each step: the caller's function, or a bar; transformers shows the bars of other models."""
    if callable(progress):
        yield progress
    elif progress is False or not is_default:
        yield lambda text: None
    else:
        with Bar("starting") as bar:
            yield bar.update


@contextmanager
def _progress_bar(is_shown: bool) -> Iterator[None]:
    """Show or hide the bars of transformers and of the hub's downloads."""
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


def _from_where(source: str) -> dict[str, Any]:
    """Options of from_pretrained: a hub that cannot be reached is asked once, which else takes half a minute a file."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if Path(source).is_dir():
        return {}
    try:
        HfApi().model_info(source, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):  # it was reached; what it said, loading finds out
        return {}
    except Exception:  # no network, no such host, a proxy that refuses: many types
        return {"local_files_only": True}
    return {}


def _from_pretrained(
    source: str, dtype: Any, tp_plan: Literal["auto"] | None = None, yarn: float | None = None
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = _from_where(source)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if yarn:
        options["config"] = _with_yarn(AutoConfig.from_pretrained(source, **options), yarn)
    if tp_plan:
        from torch import distributed
        from transformers.distributed import DistributedConfig

        size = distributed.get_world_size() if distributed.is_initialized() else None  # None: as torchrun says
        options["distributed_config"] = DistributedConfig(tp_size=size, tp_plan=tp_plan)
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options), tokenizer


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
        return (
            f"the hub has no model {name!r}, or it is private: check the spelling, or log in with `hf auth login`."
            f"{_known_name(name)}"
        )
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TransportError"}:
        return _unreachable(name)
    return f"the model {name!r} could not be loaded: {first_line(error)}"


def _unreachable(name: str) -> str:
    return (
        f"the hub cannot be reached and the model {name!r} is not on this machine: check the name and the network, "
        f"pass a folder with a config.json in it, or use the default model.{_known_name(name)}"
    )


def _known_name(name: str) -> str:
    """' Did you mean …?', or where to find names."""
    return did_you_mean(name, [*DEFAULT_NAMES, *(each.name for each in KNOWN_MODELS)]) or " See `kvkeep models`."
