"""The page in a real headless Chromium, beside a toy run in real time: production service, exchange and HTTP side."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.messages.fragment import RefusalReason, WindowView
from diloco.pipeline.messages.run import Event
from diloco.pipeline.view.loss_curves import loss_curves
from diloco.pipeline.view.page.assets import one_file
from diloco.pipeline.view.page.collector import Collector, Update
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.pipeline.view.page.model import PageModel, Poll
from diloco.pipeline.view.status import build_status
from tests import samples
from tests.browser.chromium import BINARY, Tab, tab
from tests.browser.stage import collector_of, page_of
from tests.virtual_run import VirtualLearner, end, under_way

pytestmark = [
    pytest.mark.browser,
    pytest.mark.usefixtures("no_log_lines"),
    pytest.mark.skipif(BINARY is None, reason="no chromium on PATH (Debian: apt-get install chromium)"),
]

TOKEN = "correct-horse"  # noqa: S105  # made up
EVIL = "<img src=x onerror='document.title=1'></script><script>document.title=2</script>"
GONE_PIXEL = """(lane) => {
  // Whether a lane of learners has the colour of a gap anywhere.
  const canvas = document.querySelector('#learners canvas');
  const rows = diloco.model.learners.size, tall = canvas.height / rows;
  const place = [0, Math.floor(lane * tall), canvas.width, Math.floor(tall) - 2];
  const pixels = canvas.getContext('2d').getImageData(...place).data;
  const sign = document.createElement('canvas').getContext('2d');
  sign.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--gone');
  sign.fillRect(0, 0, 1, 1);
  const [r, g, b] = sign.getImageData(0, 0, 1, 1).data;
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels[at] === r && pixels[at + 1] === g && pixels[at + 2] === b) return true;
  }
  return false;
}"""


@pytest.fixture
async def page() -> AsyncIterator[Tab]:
    async with tab() as found:
        await found.size(1400, 1000)
        yield found


async def test_a_kill_is_seen_as_a_gap_in_the_lane(page: Tab) -> None:
    """In its lane and in no other; and the sentence names who is gone. Nothing is asked of anybody else meanwhile."""
    world, (first, second) = await under_way(2)
    collector = collector_of(world)
    running = asyncio.create_task(collector.run())
    async with page_of(collector) as address:
        await page.open(address)
        await page.until("diloco.took.updates > 3 && diloco.model.learners.size === 2")
        assert await page.value(f"[0, 1].map({GONE_PIXEL})") == [False, False]
        await second.kill()
        await page.until(f"({GONE_PIXEL})(1)")
        assert await page.value(f"({GONE_PIXEL})(0)") is False
        await page.until("document.getElementById('sentence').textContent.startsWith('The run continues without l1')")
        await page.until("document.getElementById('events').textContent.includes('l1 went silent')")
        second = VirtualLearner("l1", world, 0.1, "f" * 16).start()
        await page.until("diloco.model.learners.get('l1').lives === 2 && diloco.model.learners.get('l1').does & 1")
        assert {url.split("/")[2] for url in page.requests if not url.startswith("data:")} == {address.split("/")[2]}
        assert page.errors == []
        running.cancel()
    await end(first, second)


async def test_a_rate_needs_half_of_its_span(page: Tab) -> None:
    """One merge in the first half second is no 120 a minute; a counter that begins anew is no rate either."""
    world, learners = await under_way(1)
    async with page_of(collector_of(world)) as address:
        await page.open(address)
        rates = "import('/page/rates.js').then((it) => it.rate({sums}, 0.5, 4))"
        growing = await page.value(rates.replace("{sums}", "[0, 5, 5, 6, 6, 7, 8, 9, 10, 11]"))
        assert growing == [None, None, None, None, 3, 3.5 / 1.25, 8 / 3, 9 / 3.5, 2.5, 1.5]
        anew = await page.value(rates.replace("{sums}", "[null, null, 90, 91, 92, 93, 94, 3, 4]"))
        assert anew == [None, None, None, None, None, None, 2, None, None]
    await end(*learners)


async def test_a_minute_without_merges_is_a_gap(page: Tab) -> None:
    """Bars end where merges end, and do not fall on a slope; a bar that is hardly under way says nothing yet."""
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        sums = [*range(20), *[19] * 40, *range(20, 40)]  # one a second, none for 40 s, one a second
        begins, bars = await page.value(f"import('/page/rates.js').then((it) => it.bars({sums}, 0, 1, 0, 83, 100))")
        assert begins == [0, 10, 20, 30, 40, 50, 60, 70, 80]
        assert bars == [54, 60, 0, 0, 0, 0, 60, 60, None]
        # Nothing is known when the first bar begins: what is known first counts from there.
        first = "import('/page/rates.js').then((it) => it.bars([null, null, 7, 9, 9, 10], 0, 5, 0, 30, 0))"
        assert (await page.value(first))[1] == [None, 12, 6]
        assert (await page.value("import('/page/rates.js').then((it) => it.bars([9, 9, 3, 4], 0, 10, 0, 40, 0))"))[
            1
        ] == [*(0, 0, None, 6)]


async def test_each_learner_has_a_loss_line(page: Tab) -> None:
    """Thin and by name, against time and tokens; the global loss is thick, and without one the chart says how to get
    it. Both come with patches to a page that is open."""
    model = made_up(losses=[[4.0, 3.0], [5.0]])
    plot = "diloco.charts.plots.get('loss')"
    series = f"{plot}.series.slice(1).map((one) => [one.label, one.width])"
    legend = "document.querySelector('#loss .u-legend').innerText.replace(/\\s+/g, ' ')"
    async with page_of(Still(model)) as address:
        await page.open(address)
        await page.until(f"globalThis.diloco?.took.updates > 0 && {plot}")
        assert await page.value(series) == [["global, held out", 3], ["l0", 1.3], ["l1", 1.3]]
        lacks = await page.value("document.querySelector('.lacks').innerText")
        assert lacks.endswith("run an Evaluator (doc: evaluator.md): python -m pydoc diloco.Evaluator"), lacks
        assert "global" not in await page.value(legend)
        l0, l1 = await page.value(f"[2, 3].map((n) => {plot}.data[n].filter((one) => one !== null))")
        assert (l0[0], l0[-1]) == (4.0, 3.0)
        assert l0 == sorted(l0, reverse=True)
        assert set(l1) == {5.0}
        at, tokens, loss = 1998.0, 700, 2.5
        tail = {"l1/" + "0" * 8: {"from": 1, "losses": [1.0]}}
        patch = {"losses": [[at, tokens, loss]], "curves": tail}
        await page.value(f"diloco.model.patch({json.dumps(patch)}), dispatchEvent(new Event('resize')), 0")
        await page.until(f"({legend}).includes('global, held out2.500')")
        assert await page.value("document.querySelector('.lacks').innerText.trim()") == ""
        await page.until(f"{plot}.data[3].filter((one) => one !== null).at(-1) === 1")
        await page.press("l")
        await page.until(f"{plot}?.axes[0].label === 'trained tokens'")
        assert await page.value(f"{plot}.data[0][{plot}.data[1].indexOf({loss})]") == tokens
        assert page.errors == []


async def test_the_line_of_the_chosen_learner_stands_out(page: Tab) -> None:
    """With its lane; and all are alike again when none is chosen."""
    alphas = "diloco.charts.plots.get('loss').series.slice(2).map((one) => one.alpha)"
    async with page_of(Still(made_up(losses=[[4.0, 3.0], [5.0, 4.0]]))) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.charts.plots.has('loss')")
        await page.value("document.getElementById('learners').focus()")
        await page.press("ArrowDown")
        await page.until(f"String({alphas}) === '0.25,1'")
        await page.press("Escape")
        await page.until(f"String({alphas}) === '1,1'")


async def test_many_learners_are_alike_and_one_absurd_loss_hides_none(page: Tab) -> None:
    """Their median has a name instead of each of them; the axis leaves out what is rare and far above the rest."""
    losses = [[4.0, 3.0] for _ in range(39)] + [[4.0, 1e9]]
    async with page_of(Still(made_up(losses=losses))) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.charts.plots.has('loss')")
        shown = "[...document.querySelectorAll('#loss .u-series')].filter((one) => one.offsetWidth)"
        names = f"{shown}.map((one) => one.querySelector('.u-label').textContent)"
        assert await page.value(names) == ["median of 40 learners"]
        assert await page.value("diloco.charts.plots.get('loss').scales.y.max") < 10
        assert page.errors == []


@pytest.mark.parametrize("height", [800, 3000], ids=["scrolled", "taller than the page"])
@pytest.mark.parametrize("width", [420, 1100, 1400])
@pytest.mark.parametrize("kept", [False, True], ids=["served", "as a file"])
async def test_no_chart_is_drawn_over_another(page: Tab, tmp_path: Path, kept: bool, width: int, height: int) -> None:
    """Each is as wide as its cell, from its first picture on, however many of them have something to show."""
    await page.size(width, height)
    model = made_up(infos=[BusInfo("id", "7", 5, 9)] * 2)
    async with page_of(Still(model)) as address:
        file = tmp_path / "report.html"
        file.write_text(one_file(model.snapshot(), "run"), "utf-8")
        await page.open(file.as_uri() if kept else address)
        await page.until("globalThis.diloco?.charts.plots.has('rate')")
        await page.value("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        cells = await page.value(
            "[...document.querySelectorAll('.chart')].filter((one) => one.querySelector('canvas')).map((one) => {"
            "  const plot = one.firstElementChild.getBoundingClientRect();"
            "  const cell = one.closest('section').getBoundingClientRect();"
            "  return [one.clientWidth, one.querySelector('canvas').offsetWidth,"
            "    plot.left, plot.right, plot.top, plot.bottom, cell.left, cell.right]; })"
        )
        assert len(cells) >= 2
        boxes = []
        for inner, canvas, left, right, top, bottom, cell_left, cell_right in cells:
            assert cell_left <= left < right < cell_right + 1  # widths are whole pixels
            assert inner - 90 < canvas <= inner
            boxes.append((left, right, top, bottom))
        for n, (left, right, top, bottom) in enumerate(boxes):
            for other_left, other_right, other_top, other_bottom in boxes[:n]:
                assert right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
        strips = "[...document.querySelectorAll('.strips')]"
        assert await page.value(f"{strips}.every((one) => one.scrollWidth <= one.clientWidth)")
        assert page.errors == []


async def test_a_page_without_data_says_that_it_loads(page: Tab) -> None:
    """Not a blank one; and the line goes when the run is shown."""
    model = made_up()
    collector = Still(model)
    collector._number = 0  # it has not looked yet
    async with page_of(collector) as address:
        await page.open(address)
        await page.until("document.body?.innerText.trim() === 'Loading the run …'")
        collector._number = 1
        first, collector._news = collector._news, asyncio.Event()
        first.set()
        await page.until("!document.getElementById('run').hidden")
        assert "Loading" not in await page.value("document.body.innerText")


@pytest.mark.parametrize("polls", [1, 2])
async def test_a_chart_of_one_moment_is_left_out(page: Tab, polls: int) -> None:
    """A page of a finished run has looked at Redis once."""
    async with page_of(Still(made_up(infos=[BusInfo("id", "7", 5, 9)] * polls))) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.charts.plots.has('fate')")
        assert await page.value("document.getElementById('redis').closest('section').hidden") is (polls == 1)


async def test_a_bad_beginning_does_not_flatten_the_losses(page: Tab) -> None:
    """Neither after 20 s, when it is much of what is known, nor after minutes; without one all is shown."""
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        for long in (20, 400):
            losses = [40.0, 30.0, 15.0, 5.0, *(2.0 + 2.0 / (1 + n) ** 0.5 for n in range(long - 4))]
            top = (await page.value(f"import('/page/loss.js').then((it) => it.lossRange([{losses}]))"))[1]
            assert 2.1 < top < 8
        assert (await page.value("import('/page/loss.js').then((it) => it.lossRange([[8, 7, 6, 5, null]]))"))[1] > 8


@pytest.mark.parametrize("width", [700, 1000, 1400])
async def test_charts_leave_no_holes(page: Tab, width: int) -> None:
    """However wide the screen, the last row of charts ends where the first does."""
    await page.size(width, 900)
    model = made_up(
        losses=[[4.0, 3.0]], infos=[BusInfo("id", "7", 0, 9, received_bytes=n, sent_bytes=n) for n in (1, 99)]
    )
    async with page_of(Still(model)) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.charts.plots.size === 5")
        places = "[...document.querySelectorAll('.charts section')].map((one) => one.getBoundingClientRect())"
        rows = await page.value(f"{places}.map((one) => [Math.round(one.top), Math.round(one.right)])")
        ends = {top: max(right for other, right in rows if other == top) for top, _ in rows}
        assert len(set(ends.values())) == 1, rows


async def test_a_wrong_token_shows_nothing(page: Tab) -> None:
    """No name, no number, no lane; the right one, typed, shows the run. One in the address goes out of it."""
    world, party = await under_way(1)
    collector = collector_of(world)
    running = asyncio.create_task(collector.run())
    async with page_of(collector, TOKEN) as address:
        await page.open(address)
        await page.until("!document.getElementById('ask').hidden")
        for wrong in ("wrong-token", "ünicode-token"):
            await page.until("document.getElementById('token').value === ''")
            await page.value(f"document.getElementById('token').value = '{wrong}'")
            await page.value("document.getElementById('ask').requestSubmit()")
            await page.until("document.getElementById('ask-why').textContent !== ''")
            shown = await page.value("document.body.innerText")
            assert "learner" not in shown.lower()
            assert "virtual" not in shown
            assert await page.value("document.getElementById('run').hidden && diloco.model.learners.size === 0")
        await page.value(f"document.getElementById('token').value = '{TOKEN}'")
        await page.value("document.getElementById('ask').requestSubmit()")
        await page.until("!document.getElementById('run').hidden && diloco.model.learners.size === 2")
        await page.open("about:blank")
        await page.open(f"{address}#token={TOKEN}")
        await page.until("globalThis.diloco?.model.learners.size === 2")
        assert TOKEN not in await page.value("location.href")
    async with page_of(collector, "another-token", int(address.rstrip("/").rpartition(":")[2])):
        await page.until("!document.getElementById('ask').hidden")  # the token is none any more: nothing is shown
        assert await page.value("document.getElementById('run').hidden && diloco.model.learners.size === 0")
        assert "learner" not in (await page.value("document.body.innerText")).lower()
        running.cancel()
    await end(*party)


async def test_a_page_whose_connection_broke_catches_up(page: Tab) -> None:
    """It says that what it shows is old; when the server is back it has what it has missed."""
    world, party = await under_way(1)
    collector = collector_of(world)
    running = asyncio.create_task(collector.run())
    async with page_of(collector) as address:
        await page.open(address)
        await page.until("diloco.took.updates > 3")
    await page.until("document.getElementById('link').textContent.includes('no connection')")
    before = await page.value("diloco.model.totals.outer_steps")
    async with page_of(collector, port=int(address.rstrip("/").rpartition(":")[2])):
        await page.until(f"diloco.model.totals.outer_steps > {before}")
        await page.until("document.getElementById('link').textContent === ''")
        merged = "[...diloco.model.coarse.lanes.get('F/0')].filter((bits) => bits & 16).length"
        assert await page.value(merged) >= await page.value("diloco.model.fragments.get('0').version") - 2
        running.cancel()
    await end(*party)


async def test_the_reason_of_a_window_is_said_by_keys(page: Tab) -> None:
    """Who has no pointer chooses a strip by arrows, and Escape lets go."""
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        await page.value("document.getElementById('fragments').focus()")
        await page.press("ArrowDown")
        tip = "[...document.querySelectorAll('.tip')].find((one) => !one.hidden)?.textContent ?? ''"
        await page.until(f"({tip}).includes('waits for l1')")
        assert "fragment 1, version 3: collecting 1 / 1" in await page.value(tip)
        place = "[...document.querySelectorAll('.tip')].find((one) => !one.hidden).getBoundingClientRect().top"
        row = "[...document.querySelectorAll('.chosen')].find((one) => !one.hidden).getBoundingClientRect().bottom"
        assert 0 <= await page.value(f"{place} - {row}") < 60  # its words stand by it
        await page.press("Escape")
        await page.until(f"({tip}) === ''")


async def test_what_peers_write_is_text(page: Tab) -> None:
    """Hosts, devices and reasons with markup in them make no element and run nothing, live and in a file."""
    model = made_up(EVIL)
    async with page_of(Still(model)) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        await page.value("document.getElementById('as-table').open = true")
        await page.until("document.getElementById('tables').textContent.includes('<img src=x')")
        assert await page.value("document.querySelectorAll('img, #tables script').length") == 0
        await page.until("document.title === '✓ run'")  # the page may have drawn itself empty before
        assert page.errors == []


async def test_a_page_as_a_file_needs_nobody(page: Tab, tmp_path: Path) -> None:
    """It shows what the live one showed last, asks for nothing, and breaks no rule of its own."""
    world, party = await under_way(4)
    collector = collector_of(world)
    await collector.poll()
    await asyncio.sleep(0.6)  # a chart of Redis' memory needs two moments
    await collector.poll()
    await end(*party)
    file = tmp_path / "report.html"
    file.write_text(one_file(collector.model.snapshot() | {"notes": [EVIL]}, f"of {EVIL}"), "utf-8")
    await page.open(file.as_uri())
    await page.until("globalThis.diloco?.took.updates > 0")
    assert (
        await page.value("document.getElementById('sentence').textContent")
        == collector.model.snapshot()["sentence"]["text"]
    )
    assert await page.value("document.querySelectorAll('.uplot').length") >= 2
    assert await page.value("document.getElementById('notes').textContent") == EVIL
    assert await page.value("[...diloco.model.coarse.lanes.keys()].sort().join()") == "F/0,F/1,L/l0,L/l1"
    assert [url for url in page.requests if not url.startswith("data:")] == [file.as_uri()]
    assert page.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
async def test_nothing_sticks_out(page: Tab, width: int, theme: str) -> None:
    """On a phone and on a desk, dark and light: the page is no wider than the screen."""
    await page.size(width, 800)
    await page.theme(theme)
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        assert await page.value("document.documentElement.scrollWidth") <= width
        ground = await page.value("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is (theme == "light")
        assert page.errors == []


@pytest.mark.parametrize("width", [360, 1100, 1400])
async def test_no_word_of_a_tile_is_broken(page: Tab, width: int) -> None:
    """Of all reasons for which deltas are refused: a tile is narrow, and there they are most of its text."""
    await page.size(width, 800)
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        reasons = dict.fromkeys(RefusalReason, 12345)
        await page.value(f"diloco.model.totals.refused = {json.dumps(reasons)}; dispatchEvent(new Event('resize')), 0")
        tiles = "[...document.querySelectorAll('#tiles dd')]"
        await page.until(f"{tiles}.some((one) => one.textContent.includes('12345 upload timeout'))")
        await page.value(f"{tiles}.forEach((one) => {{ one.style.overflowWrap = 'normal'; }})")
        assert await page.value(f"{tiles}.every((one) => one.scrollWidth <= one.clientWidth)")


async def test_tile_axis_and_events_go_by_one_clock(page: Tab) -> None:
    """The run's time: 0:00 is when it began. What was before is said to be, and a lane that is drawn from there on does
    not move it. The axis says so."""
    joined = Event(name="learner_joined", who="l0", detail="", unix_s=1970.0)
    async with page_of(Still(made_up(events=[joined]))) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.charts.plots.has('fate')")
        assert await page.value("diloco.model.coarse.begin") == 1970
        assert await page.value("diloco.charts.plots.get('fate').scales.x.min") == 0  # parties started before that
        assert await page.value("document.getElementById('tiles').lastElementChild.innerText") == "run time\n0:10"
        assert await page.value("document.getElementById('events').textContent") == "before 0:00  l0 joined"
        axis = "diloco.charts.plots.get('fate').axes[0].label"
        assert await page.value(axis) == "run time (0:00: the run began)"


async def test_one_of_a_kind_is_not_told_in_the_plural(page: Tab) -> None:
    """A window that expects one learner, a syncer that serves one fragment, a learner with one fragment to adopt."""
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        await page.value("import('/page/words.js').then((words) => { globalThis.words = words; }), 0")
        await page.until("globalThis.words !== undefined")
        row = "{...diloco.model.fragments.get('1'), expected: N, suspected: N, refused: N, interval: N}"
        for number, told in (
            (1, ["1 learner expected, 1 learner suspected, 1 delta refused so far", "interval 1 step;"]),
            (2, ["2 learners expected, 2 learners suspected, 2 deltas refused so far", "interval 2 steps;"]),
        ):
            words = await page.value(f"words.fragmentWords('1', {row.replace('N', str(number))}, 0)")
            assert all(one in words for one in told), words
        learner = "words.learnerWords('l0', {...diloco.model.learners.get('l0'), behind: 1}, 0)"
        assert "\n1 fragment to adopt" in await page.value(learner)
        await page.value("diloco.model.patch({syncers: [{id: 's', leads: false, fragments: 1}]})")
        await page.value("dispatchEvent(new Event('resize'))")
        await page.until("document.getElementById('syncers').textContent === 's serves 1 fragment'")


async def test_the_bar_of_goodput_is_as_long_as_the_shares_and_says_them(page: Tab) -> None:
    """In words and by length; a page that does not know it has neither."""
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        patch = "diloco.model.patch({totals: {...diloco.model.totals, ...G}}), dispatchEvent(new Event('resize'))"
        found = "{goodput: {since_start: 0.7, recent: 0.9}, badput: {away: 0.2, died: 0.1}}"
        await page.value(patch.replace("G", found))
        await page.until("document.getElementById('goodput-bar').children.length === 3")
        words = "document.getElementById('goodput-words').textContent"
        assert await page.value(words) == "Goodput 70 % of the learners' time, lately 90 %"
        told = "[...document.getElementById('goodput-legend').children].map((one) => one.textContent).join('; ')"
        assert await page.value(told) == "training that is kept 70 %; away after a death 20 %; lost by a death 10 %"
        wide = "[...document.getElementById('goodput-bar').children].map((one) => one.getBoundingClientRect().width)"
        kept, away, died = await page.value(wide)
        assert (away / kept, died / kept) == (pytest.approx(2 / 7, abs=0.02), pytest.approx(1 / 7, abs=0.02))
        colours = "[...document.getElementById('goodput-bar').children].map((o) => getComputedStyle(o).backgroundColor)"
        assert len(set(await page.value(colours))) == 3
        await page.value(patch.replace("G", "{goodput: {since_start: null, recent: null}}"))
        await page.until("document.getElementById('goodput').hidden")


async def test_the_command_of_the_remedy_is_chosen_by_one_click(page: Tab) -> None:
    """It stands for itself, so that it can be copied whole; where there is none there is no empty box."""
    model = PageModel("run", RedisRoute.of("redis://:hunter2@10.0.0.5:6379"))
    model.see(Poll(now_s=2000.0, status=build_status("run", None, None, [], [], None, [], 2000.0, 5.0, {"0": "s"})))
    model.patch()
    async with page_of(Still(model)) as address:
        await page.open(address)
        await page.until("document.getElementById('command').textContent !== ''")
        assert await page.value("document.getElementById('do').textContent") == (
            "Start one, with the password filled in:"
        )
        command = "DILOCO_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379 diloco learner --run run"
        assert await page.value("document.getElementById('command').textContent") == command
        assert await page.value("getComputedStyle(document.getElementById('command')).userSelect") == "all"
    async with page_of(Still(made_up())) as address:
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 && diloco.model.fragments.size === 2")
        assert await page.value("getComputedStyle(document.getElementById('command')).display") == "none"


class Still(Collector):
    """One that looks no more: its model is what it is."""

    def __init__(self, model: PageModel) -> None:
        self.model, self._epoch, self._number, self._followers = model, "e1", 1, 0
        self._news, self._wanted = asyncio.Event(), asyncio.Event()
        self._updates: list[Update] = []  # type: ignore[assignment]
        self._whole = Update(-1, b"")


def made_up(
    text: str = "waits for l1",
    events: Sequence[Event] = (),
    losses: Sequence[Sequence[float]] = (),
    infos: Sequence[BusInfo | None] = (None,),
) -> PageModel:
    """Two learners and two fragments, of which one has an open window; `text` in all that is free text.

    losses: of each learner, by 4 s. infos: of the server, at polls 20 s apart.
    """
    window = WindowView(state="collecting", attempt=0, members=("l0",), expected=2, reason=text, deadline_unix_s=None)
    heads = [samples.head(p, version=3, merged_tokens=50, window=window if p else samples.IDLE) for p in range(2)]
    told = [{"curve_s": 4.0, "curve": b64encode(np.array(one, "<f4").tobytes()).decode()} for one in losses]
    reports = [
        samples.seen(f"l{n}", host=text, device=text, **(told[n] if n < len(told) else {}))
        for n in range(max(2, len(losses)))
    ]
    state = samples.run_state(started_unix_s=1990.0)
    status = build_status(
        "run", samples.spec(), state, reports, heads, None, [text], 2000.0, 5.0, {"0": text}, ["0"] * 2
    )
    model = PageModel("run")
    for n, info in enumerate(infos):
        curves, told_now = loss_curves(reports, 2000.0, 1980.0), () if n else events
        now_s = 2000.0 + 20 * n
        model.see(Poll(now_s=now_s, status=status, began_s=1990.0, events=told_now, info=info, curves=curves))
    model.patch()
    return model
