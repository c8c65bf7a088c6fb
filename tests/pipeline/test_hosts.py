"""Redis URLs that name several hosts, and slots that lie evenly on whatever nodes there are."""

from itertools import pairwise

import pytest
from redis.crc import key_slot

from diloco.pipeline.bus.cluster_slots import SLOTS, numbers, slot
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis.redis_url import is_tls, parse
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import UsageError
from diloco.pipeline.view.page.join_command import RedisRoute

SENTINELS = "redis+sentinel://me:s%40cret@one:1,two,[::1]:3/main"


def test_sentinels_and_their_service_are_read_from_a_url() -> None:
    place = parse(SENTINELS + "/2?ssl_check_hostname=false")
    assert place.service == "main"
    assert place.hosts == (HostPort("one", 1), HostPort("two", 26379), HostPort("::1", 3))
    assert (place.options["username"], place.options["password"], place.options["db"]) == ("me", "s@cret", 2)
    assert place.where == "main of sentinels one:1,two:26379,[::1]:3"
    assert not is_tls(place.options)
    assert not {"username", "password"} & set(place.sentinel_options)


def test_sentinels_have_a_login_of_their_own_and_tls_as_their_servers() -> None:
    url = SENTINELS.replace("redis", "rediss") + "?sentinel_username=watch&sentinel_password=other%3F"
    place = parse(url)
    assert (place.sentinel_options["username"], place.sentinel_options["password"]) == ("watch", "other?")
    assert place.options["username"] == "me"
    assert is_tls(place.options)
    assert is_tls(place.sentinel_options)


def test_several_nodes_of_a_cluster_may_be_named() -> None:
    assert parse("redis://a:7000,b").hosts == (HostPort("a", 7000), HostPort("b", 6379))


@pytest.mark.parametrize("written", ["[fe80::1%25eth0]", "[fe80::1%eth0]"])
def test_the_zone_of_an_ipv6_address_is_read_and_shown_as_it_is_written_in_urls(written: str) -> None:
    """A browser's way, with the percent sign encoded, and a shell's."""
    place = parse(f"redis://{written}:7000")
    assert place.hosts == (HostPort("fe80::1%eth0", 7000),)
    assert place.at(place.hosts[0])["host"] == "fe80::1%eth0"
    assert place.where == "[fe80::1%25eth0]:7000"
    assert RedisRoute.of(f"redis://{written}:7000").url == "redis://[fe80::1%25eth0]:7000"


def test_connections_end_soon_after_the_other_end_has_gone_without_a_word() -> None:
    options = parse("redis://a").options["socket_keepalive_options"]
    assert int(1000 * BUS_TIMES.silent_s) in options.values()


@pytest.mark.parametrize(
    "url",
    [
        *("redis+sentinel://me:secret@one", "redis+sentinel://me:secret@one/", "redis+sentinel://me:secret@one,/main"),
        *("redis+sentinel://me:secret@one:port/main", "redis+sentinel://me:secret@one/main/x"),
        *("redis+sentinel://me:secret@/main", "redis://me:secret@one/main", "redis+other://me:secret@one/main"),
        *("http://:secret@h", "redis://:se#cret@h:6379", "redis://:secret@h:port", "redis:/:secret@h", "redis://"),
        *("redis://:x@secret#2@h:6379", "redis://:x/secret@h", "redis://h/secret", "unix://", "unix:///x#secret"),
    ],
)
def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert "cret" not in str(caught.value)
    assert "redis+sentinel://" in str(caught.value)


def test_the_page_names_sentinels_and_no_secret() -> None:
    url = SENTINELS + "?sentinel_password=other"
    route = RedisRoute.of(url)
    assert route.url == "redis+sentinel://USER:PASSWORD@one:1,two:26379,[::1]:3/main"
    assert "sentinels' own login" in route.where
    command = route.command("learner", "r")
    assert "cret" not in command
    assert "other" not in command


@pytest.mark.parametrize("run", ["run", "another.run-1", "x"])
@pytest.mark.parametrize("groups", [1, 2, 3, 8, 24, 25, 64, 500])
def test_groups_lie_evenly_on_any_number_of_nodes_with_equal_ranges_of_slots(run: str, groups: int) -> None:
    slots = [slot(f"{{{run}:{n}}}") for n in numbers(run, groups)]
    assert len(set(numbers(run, groups))) == groups
    for nodes in range(1, 12):
        held = [0] * nodes
        for one in slots:
            held[one * nodes // SLOTS] += 1
        assert max(held) - min(held) <= (0 if groups % nodes == 0 else 1 if nodes < 8 else 2)


def test_fragments_that_follow_each_other_lie_on_different_nodes() -> None:
    keys = RunKeys("run", groups=24)
    node = [slot(keys.head(p)) * 3 // SLOTS for p in range(24)]
    assert sum(a == b for a, b in pairwise(node)) <= 4


def test_slots_are_reckoned_as_redis_does() -> None:
    keys = RunKeys("a-run", groups=7)
    of_fragments = [key for p in range(7) for key in (keys.head(p), keys.delta_payload(p, "l", "0" * 8, 1))]
    for key in [keys.spec, *of_fragments]:
        assert slot(key) == slot(key.encode()) == key_slot(key.encode())
