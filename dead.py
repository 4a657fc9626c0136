# names defined at module level / methods in the given paths and used nowhere else
import ast
import collections
import pathlib
import re

R = pathlib.Path("rooms")
text = {f: f.read_text() for f in R.rglob("*.py")}
docs = "".join(f.read_text() for f in list((R / "docs").rglob("*.md")))
words = collections.Counter()
prod = collections.Counter()
for f, t in text.items():
    c = collections.Counter(re.findall(r"\w+", t))
    words += c
    if "tests" not in f.parts:
        prod += c
for p in "data checkpoint vision config jobs judges rewards".split():
    for f in (R / "engines" / p).rglob("*.py"):
        for n in ast.walk(ast.parse(text[f])):
            if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                if n.name.startswith("__"):
                    continue
                if prod[n.name] <= 1:
                    print(
                        f.relative_to(R),
                        n.lineno,
                        n.name,
                        "tests:",
                        words[n.name] - prod[n.name],
                        "docs" if n.name in docs else "",
                    )
        for s in ast.parse(text[f]).body:
            if isinstance(s, (ast.Assign, ast.AnnAssign)):
                for t in s.targets if isinstance(s, ast.Assign) else [s.target]:
                    if isinstance(t, ast.Name) and prod[t.id] <= 1:
                        print(f.relative_to(R), s.lineno, t.id, "tests:", words[t.id] - prod[t.id])
