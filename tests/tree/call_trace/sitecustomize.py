"""Traces the project's calls in windows that the environment names; Python imports it at its start.

Promises: without `READING_OUT` it does nothing. Each window is written to a file of its own when it
closes, and at the latest when the process ends; one that never met its end is not written.
"""

import atexit
import inspect
import json
import os
import sys
import threading
from types import FrameType
from typing import Any
from uuid import uuid4

PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
MAX_FRAMES = 60
"""How far up the stack the project's own caller is looked for."""


class Window:
    """What ran between the call of one function and its return, or the call of another.

    Attributes:
        question: that it answers.
        begins: file and names of the function that opens it, on its `occurrence`th call.
        until: file and name of a function whose call closes it; empty: its return does.
    """

    def __init__(self, question: str, begins: Any, occurrence: int, until: Any) -> None:
        self.question, self.begins, self.until = question, begins, until
        self.left = occurrence
        self.opened_by: FrameType | None = None
        self.functions: set[tuple[str, int]] = set()
        self.lines: set[tuple[str, int]] = set()
        self.returns: set[tuple[str, str]] = set()
        self.recipe_rooms: list[str] = []

    def turn(self, frame: FrameType, file: str) -> None:
        """Open or close at a call, where it is the one."""
        name = frame.f_code.co_name
        if self.left > 0 and file == self.begins[0] and name in self.begins[1:]:
            self.left -= 1
            self.opened_by = frame if self.left == 0 else None
        elif self.opened_by is not None and [file, name] == self.until:
            self.write()

    def note_call(self, frame: FrameType, file: str) -> None:
        """Note a call of the project's own code; a comprehension is part of its function."""
        code = frame.f_code
        if code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = names[names[:1] == ("self",) :]  # a property of the recipe is no place it goes to
        self.functions.add((file, code.co_firstlineno))
        room = os.path.dirname(file)
        if any(map(is_traced_recipe, map(frame.f_locals.get, names))) and self.recipe_rooms[
            -1:
        ] != [room]:
            self.recipe_rooms.append(room)

    def write(self) -> None:
        """Write what was seen and forget it."""
        found = {
            "question": self.question,
            "functions": sorted(self.functions),
            "lines": sorted(self.lines),
            "returns": sorted(self.returns),
            "recipe_rooms": self.recipe_rooms,
        }
        self.opened_by, self.left = None, -1
        path = os.path.join(os.environ["READING_OUT"], f"{uuid4().hex}.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)


def is_traced_recipe(value: Any) -> bool:
    """True for the recipe that runs; others are loaded too, such as the default of the flow."""
    is_recipe = type(value).__name__ == "Recipe"
    return is_recipe and getattr(value, "name", "") == os.environ["READING_RECIPE"]


class Tracer:
    """Tells the open windows what is called.

    Args:
        root: of the checkout, with a slash at its end.
        windows: to open, one after another or within each other.
    """

    def __init__(self, root: str, windows: list[Window]) -> None:
        self._root, self._windows = root, windows

    def install(self) -> None:
        """Trace this process and its threads."""
        atexit.register(self._write_open)
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = self._own_file(frame)
        if not file or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return None  # of other people, or the body of a module or a class
        for window in self._windows:
            window.turn(frame, file)
        is_open = [window for window in self._windows if window.opened_by is not None]
        for window in is_open:
            window.note_call(frame, file)
        return self._within if is_open else None

    def _within(self, frame: FrameType, event: str, _: Any) -> Any:
        file = self._own_file(frame)
        for window in self._windows:
            if window.opened_by is None:
                continue
            window.lines.add((file, frame.f_lineno))
            if event == "return":
                caller = self._own_caller(frame)
                if caller and caller != file and not frame.f_code.co_name.startswith("<"):
                    window.returns.add((f"{file}:{frame.f_code.co_firstlineno}", caller))
                if frame is window.opened_by and not window.until:
                    window.write()
        return self._within

    def _own_file(self, frame: FrameType) -> str:
        """Path of a frame's file within the project; empty for other people's code."""
        name = frame.f_code.co_filename
        inner = name[len(self._root) :] if name.startswith(self._root) else ""
        return inner if inner.partition("/")[0] in PACKAGES else ""

    def _own_caller(self, frame: FrameType) -> str:
        above = frame.f_back
        for _ in range(MAX_FRAMES):
            if above is None:
                return ""
            if file := self._own_file(above):
                return file
            above = above.f_back
        return ""

    def _write_open(self) -> None:
        sys.settrace(None)
        for window in self._windows:
            if window.opened_by is not None and not window.until:
                window.write()


if "READING_OUT" in os.environ:
    asked = json.loads(os.environ["READING_WINDOWS"])
    Tracer(os.environ["READING_ROOT"], [Window(**window) for window in asked]).install()
