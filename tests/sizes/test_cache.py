"""What is kept of measurements: the newest, as long as the objects in their keys live."""

from retrograde.sizes.cache import LRUCache, Recent


class Part:
    pass


def test_a_result_is_dropped_with_an_object_of_its_key():
    cache, part = LRUCache(), Part()
    assert cache.get("key", lambda: 1, [part]) == cache.get("key", lambda: 2, [part]) == 1
    del part
    assert cache.get("key", lambda: 3) == 3


def test_the_newest_results_are_kept():
    cache, recent = LRUCache(most=2), Recent(most=2)
    for key in "abac":
        cache.get(key, lambda key=key: key)
        recent[key] = key
    assert len(cache) == 2
    assert cache.get("a", lambda: "anew") == "a"
    assert cache.get("b", lambda: "anew") == "anew"
    assert [*recent] == ["b", "c"]
