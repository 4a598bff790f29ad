"""pass@k: the chance that at least one of k completions is right, estimated without bias from n of them.

Not here: what counts as right. Chen et al. 2021, arXiv 2107.03374, equation 1.
"""

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)` for n completions of which c are right.

    Example: `pass_at_k(4, 1, 2)` is 0.5: of the six pairs out of four, three hold the right one.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n; n is {n}, c is {c}, k is {k}")
    return 1.0 - comb(n - c, k) / comb(n, k)
