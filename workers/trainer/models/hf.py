"""Builds causal language models of transformers in float32, by transformers' own classes and the config that learners
share."""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.payload.codec import as_bytes
from diloco.workers.trainer.models.hf_config import EXTRA, HfModel, config_of
from diloco.workers.trainer.optional import first_line, library

# How often a parameter may be set in a module while a model is built: tied parameters are set several times.
_MAX_REGISTERED = 4


def build_hf(given: HfModel, seed: int, *, weights: bool = True) -> nn.Module:
    """Build the model. Called with tokens (B, T), it returns an output that has `logits` (B, T, V).

    Parameters have the names that transformers gives them. Their values come from the folder. Without weights there, or
    if `weights` is False, they are random: the same seed gives the same values with the same version of transformers.

    Raises:
        UsageError: raised by `config_of`, or the weights are incomplete.
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
    except Exception as error:  # each kind of model raises its own
        raise UsageError(f"model_type {given.config['model_type']!r} cannot be built: {first_line(error)}") from error
    built: nn.Module = model.train()
    return built


def check_tensors(given: HfModel, tensors: Sequence[TensorSpec]) -> None:
    """Check that a model has exactly a run's tensors, without allocating memory for them.

    Both the config and the tensors come from a peer, so nothing of their size is allocated before they agree.

    Raises:
        UsageError: raised by `config_of`, or the model cannot be built.
        SpecMismatch: names a tensor that differs.
    """
    config = config_of(given)
    transformers = library("transformers", EXTRA, "this run's model")
    run = {one.name: one.shape for one in tensors}
    most = _MAX_REGISTERED * len(run)
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise SpecMismatch(f"this run's model config creates more tensors than the {len(run)} in its spec")

    # Meta tensors take no memory, but a config with very many layers would still make very many modules: the hook stops
    # the construction once it has set more parameters than the run's tensors allow.
    hook = register_module_parameter_registration_hook(counted)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except SpecMismatch:
        raise
    except Exception as error:  # each kind of model raises its own
        raise UsageError(f"model_type {given.config['model_type']!r} cannot be built: {first_line(error)}") from error
    finally:
        hook.remove()
    trained = {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if tensor.numel()}
    here = {name: tuple(tensor.shape) for name, tensor in model.named_buffers() if name in run} | trained
    if wrong := sorted(name for name in run.keys() | here.keys() if run.get(name) != here.get(name)):
        name = wrong[0]
        raise SpecMismatch(
            f"this run's model config and its tensors disagree, in {len(wrong)} of them: {name} is "
            f"{here.get(name, 'absent')} in the config, but {run.get(name, 'absent')} in the spec"
        )


def weights_digest(model: nn.Module) -> str:
    """Return xxh3-128 in hex over all parameters by name: it tells whether two learners begin from the same weights."""
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
