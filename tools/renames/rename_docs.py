# ruff: noqa: B006, D103, E401, E501, E741, F401, I001, RUF005, SIM115, T201
"""Renames old identifiers in backticks of comments, docstrings and docs where they no longer exist in code; parameters in their function's own doc."""

import ast, io, json, re, glob, pathlib, collections, tokenize, sys, os

maps = [json.loads(l) for f in glob.glob("tools/renames/*.jsonl") for l in open(f)]
maps = [r for r in maps if r.get("owner") not in ("string literal", "metric name", "command line")]
rs = [
    f
    for p in ("rust", "tests/rust", "benches")
    for f in glob.glob(p + "/**/*.rs", recursive=True)
    if "/target/" not in f
]
py = [
    f
    for p in ("python", "tests/python", "benches", "examples")
    for f in glob.glob(p + "/**/*.py*", recursive=True)
    if f.endswith((".py", ".pyi"))
]
md = (
    glob.glob("docs/**/*.md", recursive=True)
    + ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    + glob.glob("benches/**/*.md", recursive=True)
    + glob.glob("tests/**/*.md", recursive=True)
)
exist = collections.Counter()
for f in rs:
    for l in pathlib.Path(f).read_text().split("\n"):
        exist.update(set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", re.sub(r'"(?:[^"\\]|\\.)*"', "", l)))))
for f in py:
    try:
        for t in tokenize.generate_tokens(io.StringIO(pathlib.Path(f).read_text()).readline):
            if t.type == tokenize.NAME:
                exist[t.string] += 1
    except Exception as e:
        print(f, e)
new = collections.defaultdict(set)
for r in maps:
    if r["kind"] not in ("param", "arg", "mod"):
        new[r["old"]].add(r["new"])
amb = collections.Counter()
n = 0
SPAN = re.compile(r"`[^`\n]+`")


def fixspan(span, extra={}):
    def tok(m):
        global n
        o = m[0]
        if o in extra:
            n += 1
            return extra[o]
        if o in new and not exist[o]:
            if len(new[o]) == 1:
                n += 1
                return next(iter(new[o]))
            amb[o] += 1
        return o

    return re.sub(r'(?<![\w"\'.-])[A-Za-z_]\w*|(?<=\.)[A-Za-z_]\w*', tok, span)


def fixtext(t, extra={}):
    return SPAN.sub(lambda m: fixspan(m[0], extra), t)


params = collections.defaultdict(dict)
byfn = {}
for r in maps:
    if r["kind"] in ("type", "fn", "method"):
        byfn[(r["at"], r["kind"], r["old"])] = r["new"]
for r in maps:
    if r["kind"] in ("param", "arg") and r.get("owner"):
        parts = r["owner"].replace("::", ".").split(".")
        last = parts[-1]
        for cand in {last, *[v for (a, k, o), v in byfn.items() if a == r["at"] and o == last]}:
            params[(r["at"], cand)][r["old"]] = r["new"]
for f in rs:
    s = pathlib.Path(f).read_text()
    ls = s.split("\n")
    # own params
    for i, l in enumerate(ls):
        m = re.match(r"\s*(?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?(?:async )?fn (\w+)", l)
        ex = params.get((f, m[1])) if m else None
        if ex:
            j = i - 1
            while j >= 0 and (ls[j].strip().startswith(("///", "#["))):
                if ls[j].strip().startswith("///"):
                    ls[j] = fixtext(ls[j], ex)
                j -= 1
    for i, l in enumerate(ls):
        m = re.match(r"^(.*?)(//.*)$", l)
        if m and "`" in m[2]:
            ls[i] = m[1] + fixtext(m[2])
    t = "\n".join(ls)
    if t != s:
        pathlib.Path(f).write_text(t)
for f in py:
    s = pathlib.Path(f).read_text()
    try:
        tree = ast.parse(s)
    except SyntaxError:
        continue
    ls = s.split("\n")
    doc = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
            and isinstance(node.body[0].value, ast.Constant)
            and isinstance(node.body[0].value.value, str)
        ):
            d = node.body[0]
            rng = range(d.lineno - 1, d.end_lineno)
            doc.update(rng)
            names = [node.name] if hasattr(node, "name") else []
            ex = params.get((f, names[0]), {}) if names else {}
            if isinstance(node, ast.ClassDef):
                ex = (
                    {**params.get((f, "__init__"), {}), **params.get((f, "__new__"), {})}
                    if False
                    else {
                        **ex,
                        **{
                            r["old"]: r["new"]
                            for r in maps
                            if r["kind"] in ("param", "field")
                            and r["at"] == f
                            and (r.get("owner") or "").split(".")[0]
                            in (
                                node.name,
                                *[o for (a, k, o), v in byfn.items() if a == f and k == "type" and v == node.name],
                            )
                        },
                    }
                )
            for k in rng:
                if ex:
                    ls[k] = fixtext(ls[k], ex)
                    m = re.match(r"^(\s+(?:- )?)(`?)(\w+)(`?)(:| \()", ls[k])
                    if m and m[3] in ex:
                        ls[k] = m[1] + m[2] + ex[m[3]] + m[4] + ls[k][m.end(4) :]
                        n += 1
    for k, l in enumerate(ls):
        if k in doc or l.strip().startswith(('"""', "#", "#:")):
            ls[k] = fixtext(l)
        elif "  # " in l:
            a, b = l.split("  # ", 1)
            ls[k] = a + "  # " + fixtext(b)
    t = "\n".join(ls)
    if t != s:
        pathlib.Path(f).write_text(t)
for k in [k for k in new if k.isupper()]:
    del new[k]
for f in md:
    s = pathlib.Path(f).read_text()
    t = fixtext(s)
    if t != s:
        pathlib.Path(f).write_text(t)
print("replaced", n, "ambiguous", amb.most_common(60))
