"""The evaluator process: it measures the held-out loss of the built-in trainer's model in any run of it."""

import asyncio

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.signals import AGAIN_STATUS, stop_event
from diloco.pipeline.settings import EvaluatorProcess
from diloco.workers.exchange.evaluating import Evaluating, Measured, follow
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.tokenized import check_tokenizer, open_for
from diloco.workers.trainer.models.hf_config import read_hf
from diloco.workers.trainer.models.named import check_model, model_of
from diloco.workers.trainer.recipe import check_text, choose_device, held_out_loss, use_threads


def built_in(spec: Spec, settings: EvaluatorProcess) -> Measured:
    """Return the run's model and a function that measures its loss on the validation slice of the run's text.

    The text is at the place that the settings name, otherwise at that in the spec.

    Raises:
        UsageError: the run's model is not built in, or its text or tokenizer is not on this machine.
        SpecMismatch: the text differs from the run's, or the model from the run's tensors.
    """
    place, seq_len = settings.data or spec.trainer.get("data"), spec.trainer.get("seq_len")
    check_model(spec)
    if not isinstance(place, str) or not isinstance(seq_len, int):
        raise UsageError("this run was not started by the built-in trainer: its spec names neither data nor seq_len")
    text = open_for(place, read_hf(settings.model) if settings.model else None, seq_len)
    check_tokenizer(text, spec.trainer)
    check_text(text, place, spec.trainer)
    model = model_of(spec.trainer)
    validation = Blocks(text.validation, seq_len).spread(settings.eval_tokens)
    device = choose_device(settings.eval_device)
    return Measured(model.to(device), lambda model: held_out_loss(model, validation, device))


async def follow_run(settings: EvaluatorProcess, stop: asyncio.Event) -> bool:
    """Evaluate until the run is finished and measured (return True), or `stop` is set.

    An unavailable bus does not end it.

    Raises:
        UsageError, SpecMismatch: raised by `built_in`.
    """
    url = settings.need_url()

    def begin(spec: Spec) -> Evaluating:
        return Evaluating(spec, built_in(spec, settings), settings.eval_every)

    return await follow(url, settings.run, begin, stop)


def evaluate_run(settings: EvaluatorProcess) -> int:
    """Run `diloco evaluator`; return the exit status, which is 0 once the run is finished and measured.

    Raises:
        UsageError, SpecMismatch: raised by `follow_run`.
    """
    use_threads(settings.threads)

    async def main() -> bool:
        return await follow_run(settings, stop_event())

    return 0 if asyncio.run(main()) else AGAIN_STATUS
