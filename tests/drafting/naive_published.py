"""Plain twins of the kernels of published rules."""

import heapq
from collections import Counter
from itertools import count


def earliest_end(text: list[int], length: int) -> int:
    for end in range(length, len(text)):
        if text[end - length : end] == text[len(text) - length :]:
            return end
    return len(text)


def counts_of(text: list[int], depth: int) -> Counter[tuple[int, ...]]:
    """How often every string of at most `depth` tokens occurs, the end of the text included."""
    return Counter(tuple(text[i : i + n]) for i in range(len(text)) for n in range(1, depth + 1) if i + n <= len(text))


def speculate(
    text: list[int], factor: float, nodes: int, depth: int, tree_depth: int, min_p: float
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Drafted (path, probability) pairs of each match length with the best score; equal probabilities in any order."""
    seen = counts_of(text, tree_depth)
    tokens = sorted(set(text))
    drafts: list[list[tuple[tuple[int, ...], float]]] = [[]]
    for m in range(1, min(len(text), tree_depth)):
        match = tuple(text[-m:])
        if seen[match] < 2:
            break
        order = count()
        front = [(-1.0, next(order), ())]
        taken: list[tuple[tuple[int, ...], float]] = []
        while front and len(taken) < min(nodes, int(factor * m)) + 1:
            p, _, path = heapq.heappop(front)
            taken.append((path, -p))
            if len(path) == min(depth, tree_depth - m):
                continue
            for token in tokens:
                n = seen[(*match, *path, token)]
                q = -p * n / seen[(*match, *path)]
                if n and q >= min_p:
                    heapq.heappush(front, (-q, next(order), (*path, token)))
        drafts.append(taken[1:])
    scores = [sum(p for _, p in draft) for draft in drafts]
    return [draft for draft, score in zip(drafts, scores, strict=True) if score > max(scores) - 1e-12]
