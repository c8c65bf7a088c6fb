"""Causal language models of transformers, built as the run's learners agree on them: in float32, by its own classes."""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.payload.codec import as_bytes
from diloco.workers.trainer.models.hf_checks import config_of
from diloco.workers.trainer.models.hf_config import EXTRA, HfModel
from diloco.workers.trainer.optional import first_line, library

_MOST_REGISTERED = 4
"""Times that a parameter may be set in a module while a model is built: tied ones are several times."""


def build_hf(given: HfModel, seed: int, *, weights: bool = True) -> nn.Module:
    """The model, to be called with tokens (B, T); it returns an output that has `logits` (B, T, V).

    Parameters have the names that transformers gives them. They are those of the folder; without weights there, or
    unless `weights`, random ones: the same seed gives the same ones, by the same version of transformers.

    Raises:
        UsageError: as `config_of`, or the weights are not all there.
    """
    config = config_of(given)
    transformers = library("transformers", EXTRA, "this run's model")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if weights and given.has_weights:
                model = _from_weights(transformers, given, config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except UsageError:
        raise
    except Exception as error:  # of a library that has many models
        raise UsageError(f"model_type {given.config['model_type']!r} cannot be built: {first_line(error)}") from error
    built: nn.Module = model.train()
    return built


def check_tensors(given: HfModel, tensors: Sequence[TensorSpec]) -> None:
    """Whether a model has a run's tensors and no others, before memory is taken for it: both come from a peer.

    Raises:
        UsageError: as `config_of`.
        SpecMismatch: naming a tensor that differs.
    """
    config = config_of(given)
    transformers = library("transformers", EXTRA, "this run's model")
    run = {one.name: one.shape for one in tensors}
    most = _MOST_REGISTERED * len(run)
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise SpecMismatch(f"this run's model config is of more tensors than the {len(run)} that its spec has")

    hook = register_module_parameter_registration_hook(counted)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except SpecMismatch:
        raise
    except Exception as error:  # of a library that has many models
        raise UsageError(f"model_type {given.config['model_type']!r} cannot be built: {first_line(error)}") from error
    finally:
        hook.remove()
    trained = {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if tensor.numel()}
    here = {name: tuple(tensor.shape) for name, tensor in model.named_buffers() if name in run} | trained
    if wrong := sorted(name for name in run.keys() | here.keys() if run.get(name) != here.get(name)):
        name = wrong[0]
        raise SpecMismatch(
            f"this run's model config and its tensors disagree, in {len(wrong)} of them: {name} is "
            f"{here.get(name, 'absent')} by the config, and {run.get(name, 'absent')} in the spec"
        )


def weights_digest(model: nn.Module) -> str:
    """xxh3-128 over all parameters by name, in hex: whether two learners begin from the same weights."""
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(as_bytes(parameter.detach().cpu().contiguous().numpy()))
    return digest.hexdigest()


def _from_weights(transformers: Any, given: HfModel, config: Any) -> Any:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        given.folder,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(told["missing_keys"]):
        raise UsageError(f"the weights in {given.folder} lack {len(missing)} of the model's tensors: {missing[0]} ...")
    return model
