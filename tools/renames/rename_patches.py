# ruff: noqa: B023, D103, E401, E741, I001, SIM115, T201
"""Renames attributes that tests patch by name: `setattr(module, "name", ...)` and dotted paths."""

import json, re, collections, pathlib, glob

new = collections.defaultdict(set)
for l in open("tools/renames/python.jsonl"):
    r = json.loads(l)
    if r["kind"] != "param":
        new[r["old"]].add((r["new"], pathlib.Path(r["at"]).stem, (r.get("owner") or "").split(".")[0]))
types = {r["old"]: r["new"] for r in map(json.loads, open("tools/renames/python.jsonl")) if r["kind"] == "type"}
left = []
KEEP = {("torch.cpu", "Event"), ("SaveSession", "publish"), ("CacheTable", "open")}
for f in glob.glob("tests/python/**/*.py", recursive=True) + glob.glob("benches/python/**/*.py", recursive=True):
    p = pathlib.Path(f)
    ls = p.read_text().split("\n")
    for i, l in enumerate(ls):

        def one(m):
            target, name = m[1], m[2]
            c = new.get(name)
            if not c or (target, name) in KEEP:
                return m[0]
            t = target.split(".")[-1]
            d = [x for x in c if x[1] == t or x[2] == t or types.get(x[2]) == t] or list(c)
            names = {x[0] for x in d}
            if len(names) == 1:
                return f'setattr({target}, "{names.pop()}"'
            left.append((f, i + 1, l.strip()))
            return m[0]

        l = re.sub(r'setattr\(([\w.]+), "(\w+)"', one, l)

        def dotted(m):
            parts = m[1].split(".")
            return (
                '"'
                + ".".join(
                    [parts[0]]
                    + [
                        types.get(x)
                        or (
                            next(iter({n[0] for n in new[x]}))
                            if len({n[0] for n in new.get(x, ())}) == 1 and k == len(parts) - 2
                            else x
                        )
                        for k, x in enumerate(parts[1:])
                    ]
                )
                + '"'
            )

        if "setattr(" in l or "patch" in l:
            l = re.sub(r'"(torchrec_embcache\.[\w.]+)"', dotted, l)
        ls[i] = l
    p.write_text("\n".join(ls))
for x in left:
    print(x)
