"""Tables of the pages, and the format of bytes and times in them."""

__all__ = ["MIB", "size", "table", "time"]

MIB = 2**20


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def size(count: float) -> str:
    """Bytes in MiB, to three digits."""
    mib = count / MIB
    return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.1f} MiB" if mib >= 1 else f"{mib:.2f} MiB"


def time(ms: float) -> str:
    if ms < 0.1:
        return f"{1e3 * ms:.0f} µs"
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
