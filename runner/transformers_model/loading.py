"""Building a folder's model with transformers' own code. The only place that imports transformers at length.

Nothing is fetched: the folder holds everything, and code that a folder brings along is never run.
"""

from __future__ import annotations

from typing import Any

import torch

from actors.messages.errors import ConfigurationError
from runner.store.through_transformers import HOW_TO_INSTALL
from runner.transformers_model.attention import IMPLEMENTATION, register


def prepare() -> Any:
    """transformers, with kvyard's attention known to it. Raises ConfigurationError when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"this model needs transformers, which cannot be imported ({error}): {HOW_TO_INSTALL}"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    register()
    return transformers


def load_configuration(folder: str) -> Any:
    """Raises whatever transformers raises for a configuration that it does not know."""
    return prepare().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def without_weights(configuration: Any) -> torch.nn.Module:
    """The model on the meta device. Raises what its class raises."""
    with torch.device("meta"):
        model: torch.nn.Module = prepare().AutoModelForCausalLM.from_config(
            configuration, attn_implementation=IMPLEMENTATION, trust_remote_code=False
        )
    return _unwarned(model).eval()


def with_weights(folder: str, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Raises ConfigurationError when the weights do not fit the model."""
    model, loading = prepare().AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    for what, said in (("missing_keys", "lack"), ("mismatched_keys", "have a wrong shape for")):
        if loading[what]:
            names = sorted(str(name) for name in loading[what])
            raise ConfigurationError(f"the weights {folder} {said} {len(names)} tensors, such as {names[0]}")
    loaded: torch.nn.Module = model
    return _unwarned(loaded).eval().requires_grad_(False).to(device)


def _unwarned(model: torch.nn.Module) -> torch.nn.Module:
    """Some models look at their input for padding, to warn of it: a wait for the device, and there is none here."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_, **__: None  # type: ignore[assignment]
    return model
