"""Draws docs/schedule.svg: the learning rate of a run with three cycles (`python docs/draw_schedule.py`)."""

from math import log10
from pathlib import Path

from suptickets.schedules import cycles, step_drops

EPOCHS, NORMAL, LENGTH = 250, 226, 8
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 260, 60, 16, 36


def rate(epoch: float) -> float:
    """Paper's CIFAR recipe, in tenths of an epoch."""
    step = round(epoch * 10) + 1
    if step <= NORMAL * 10:
        return step_drops(0.1, [1130, 1690])(step)
    return cycles("triangle", LENGTH * 10, 0.001, 0.005)(step - NORMAL * 10)


def x(epoch: float) -> float:
    """The cycles get half of the width."""
    inner = WIDTH - LEFT - 12
    share = epoch / NORMAL / 2 if epoch <= NORMAL else 0.5 + (epoch - NORMAL) / (EPOCHS - NORMAL) / 2
    return LEFT + inner * share


def y(lr: float) -> float:
    """Logarithmic, from 0.0007 to 0.15."""
    low, high = log10(0.0007), log10(0.15)
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - log10(lr)) / (high - low)


def draw() -> str:
    """The picture, readable on light and dark pages."""
    line = " ".join(
        f"{x(t / 10):.1f},{y(rate(t / 10)):.1f}" for t in [*range(0, EPOCHS * 10, 5), EPOCHS * 10 - 1]
    )
    ends = [NORMAL + LENGTH * n for n in (1, 2, 3)]
    dots = "".join(f'<circle cx="{x(e):.1f}" cy="{y(0.001):.1f}" r="5" fill="#2e8b57"/>' for e in ends)
    grid = "".join(
        f'<text x="{LEFT - 8}" y="{y(lr) + 4:.1f}" text-anchor="end">{lr}</text>'
        f'<path d="M{LEFT} {y(lr):.1f}H{WIDTH - 12}" stroke="#8884"/>'
        for lr in (0.1, 0.01, 0.005, 0.001)
    )
    ticks = "".join(
        f'<text x="{x(e):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{e}</text>'
        for e in (0, 113, 169, 226, *ends)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="12" fill="#888">{grid}{ticks}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 2}" text-anchor="middle">epoch</text>'
        f'<path d="M{x(NORMAL):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="4"/>'
        f'<text x="{x(NORMAL) - 8:.1f}" y="{TOP + 12}" text-anchor="end">normal sparse training</text>'
        f'<text x="{x(NORMAL) + 8:.1f}" y="{TOP + 12}">cycles: explore, up, down, collect (green)</text>'
        f'<polyline points="{line}" fill="none" stroke="#c0392b" stroke-width="2"/>{dots}</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("schedule.svg").write_text(draw())
