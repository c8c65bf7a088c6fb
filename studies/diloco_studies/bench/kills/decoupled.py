"""The decoupled run of the comparison: `diloco chaos` with the defaults of a run, its learners killed by the plan."""

from diloco.launcher.folder import Folder
from diloco.launcher.report import build
from diloco.pipeline.files.strict_json import dumps
from diloco_studies.bench.kills.curves import Run
from diloco_studies.bench.kills.plan import Plan, kills
from diloco_studies.strikes import report as chaos_report
from diloco_studies.strikes import run as chaos_run
from diloco_studies.strikes.settings import ChaosProcess


async def run(plan: Plan, settings: ChaosProcess, folder: Folder) -> Run | None:
    """Train until the budget or the time is spent, and audit what it leaves; None: the user stopped it.

    Raises:
        DilocoError: it could not be struck, or read afterwards; nothing is left running.
    """
    facts, evidence = await chaos_run.run(settings, folder, plan.within_s, kills(plan))
    folder.report.write_text(dumps(build(facts.outcome), indent=1) + "\n")
    if facts.stopped:
        return None
    report = chaos_report.build_chaos(facts, evidence)
    ledger = report["ledger"]
    return Run(
        evaluations=[(one.unix_s, one.tokens, one.loss) for one in facts.outcome.evaluations],
        steps={name: [at for _, times_s in lives for at in times_s] for name, lives in facts.steps.items()},
        strikes=evidence.strikes,
        tokens={
            "trained": ledger["tokens"],
            "final": ledger["merged"],
            "lost": ledger["tokens"] - ledger["merged"],
        },
        finished=ledger["tokens"] >= plan.tokens,
        broken=[f"{one['promise']}: {one['detail']}" for one in report["violations"]],
    )
