"""NumPy's matrix products on one thread: with more, their sums are added up in another order, and have other bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from threadpoolctl import ThreadpoolController

Given = ParamSpec("Given")
Result = TypeVar("Result")


def on_one_thread(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function whose result depends neither on the number of cores nor on OMP_NUM_THREADS."""

    @wraps(function)
    def limited(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with _controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


@cache
def _controller() -> ThreadpoolController:
    """It looks for the libraries that are loaded, which takes milliseconds."""
    return ThreadpoolController()
