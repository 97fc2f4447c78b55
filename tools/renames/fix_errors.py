# ruff: noqa: D100, D103, E401, E501, E741, I001, SIM115, T201, UP031
import json, subprocess, collections, re, sys, os, pathlib

names = collections.defaultdict(lambda: collections.defaultdict(set))
for f in ["cache_rest", "checkpoint_serve", "ssd_io", "python"]:
    for l in open(f"tools/renames/{f}.jsonl"):
        r = json.loads(l)
        if r["at"].endswith(".rs"):
            names[r["kind"]][r["old"]].add((r["new"], r.get("owner") or "", r["at"]))
types = {o: {n for n, _, _ in v} for o, v in names["type"].items()}
PREF = {
    "Hold": "DirLockPurpose",
    "Published": "PublishedCheckpoint",
    "Rule": "ExpiryRule",
    "Segments": "LoadSegments",
    "Columns": "LoadColumns",
    "Extent": "DenseExtent",
    "Part": "CheckpointPart",
    "Access": "MappingAccess",
    "Chunk": "RowChunk",
    "Arena": "RowArena",
}


def cands(kinds, old, owner=None, file=None):
    r = cands0(kinds, old, owner, file)
    if len(r) > 1 and (FILE.startswith(("tests/", "benches/")) and PREF.get(old) in r):
        return {PREF[old]}
    if len(r) > 1 and FILE.endswith("ssd/room/tests.rs") and old == "View":
        return {"CompactionView"}
    if len(r) > 1 and old == "taken" and "sweeps.rs" in FILE and old == "taken":
        return {"expired_by"}
    return r


FILE = ""


def cands0(kinds, old, owner=None, file=None):
    c = [x for k in kinds for x in names[k].get(old, ())]
    if owner:
        m = [x for x in c if owner in types.get(x[1].split("::")[0], {x[1]}) or x[1] == owner]
        if m:
            c = m
    if len({x[0] for x in c}) > 1 and file:
        d = os.path.dirname(file)
        while d:
            m = [x for x in c if x[2].startswith(d)]
            if m:
                c = m
                break
            d = os.path.dirname(d)
    return {x[0] for x in c}


FLAGS = sys.argv[1:]
for rnd in range(80):
    p = subprocess.run(
        [
            "nice",
            "-n",
            "15",
            "cargo",
            "check",
            *os.environ.get("CARGS", "--workspace --all-targets").split(),
            "--message-format=json",
            *FLAGS,
        ],
        capture_output=True,
        text=True,
    )
    fixes = collections.defaultdict(dict)
    rest = []
    for l in p.stdout.splitlines():
        try:
            m = json.loads(l)
        except ValueError:
            continue
        m = m.get("message")
        if not m or m.get("level") != "error" or not m.get("code"):
            if m and m.get("level") == "error":
                rest.append(m.get("rendered", ""))
            continue
        code = m["code"]["code"]
        text = m["message"]
        sp = [s for s in m["spans"] if s["is_primary"]]
        if not sp:
            continue
        sp = sp[0]
        while sp.get("expansion") and not sp["file_name"].startswith(("rust", "tests", "benches")):
            sp = sp["expansion"]["span"]
        q = re.findall(r"`([^`]*)`", text)
        FILE = sp["file_name"]
        old = None
        owner = None
        kinds = []
        if code in ("E0609", "E0610", "E0560", "E0559", "E0026", "E0027"):
            mm = re.search(r"field(?:s)? (?:named )?`(\w+)`", text)
            old = mm and mm[1]
            kinds = ["field"]
            mm = re.search(r"(?:type|struct|variant) `(?:ExpiryRule::)?([^`]*)`", text)
            owner = mm and re.sub(r"^&(?:'\w+ )?(?:mut )?|<.*", "", mm[1]).split("::")[-1]
        elif code in ("E0599",):
            mm = re.search(
                r"(?:method|function|associated function or constant|variant|variant or associated item|function or associated item|associated item|constant) (?:named )?`(\w+)`",
                text,
            ) or re.search(r"named `(\w+)`", text)
            old = mm and mm[1]
            kinds = ["method", "fn", "variant", "const"]
            mm = re.search(r"for (?:\w+ )*`([^`]*)`", text)
            owner = mm and re.sub(r"^&(?:'\w+ )?(?:mut )?|<.*", "", mm[1]).split("::")[-1]
        elif code in ("E0616", "E0624"):
            continue
        elif code == "E0432" and len([s for s in m["spans"] if s["is_primary"]]) >= 1:
            for z in [s for s in m["spans"] if s["is_primary"]]:
                line = z["line_start"]
                t = z["text"][0]["text"]
                a, b = z["column_start"] - 1, z["column_end"] - 1
                w = re.findall(r"\w+", t[a:b])
                w = [x for x in w if any(x == y.split("::")[-1] for y in q)] or w[-1:]
                if not w:
                    continue
                o = w[-1]
                pth = [y for y in q if y.split("::")[-1] == o]
                mod = pth[0].split("::")[1:-1] if pth else []
                c = cands(
                    ["type", "fn", "const"],
                    o,
                    None,
                    "rust/core/src/" + "/".join(mod) + "/x.rs"
                    if pth and pth[0].startswith("embcache::")
                    else z["file_name"],
                )
                if len(c) != 1:
                    rest.append(f"[{o}: {c}] {z['file_name']}:{line}")
                    continue
                i = re.search(r"\b%s\b" % re.escape(o), t[a:b])
                fixes[z["file_name"]][(line, a + i.start())] = (o, c.pop())
            continue
        elif code in ("E0425", "E0433", "E0432", "E0412", "E0422", "E0531", "E0405", "E0404", "E0574", "E0532"):
            mm = re.findall(r"`([^`]*)`", text)
            old = mm[0].split("::")[-1] if mm else None
            kinds = ["type", "fn", "const", "variant", "param", "arg", "mod", "method"]
        elif code == "E0407":
            old = q[0]
            owner = q[1]
            kinds = ["method"]
        elif code == "E0046":
            rest.append(m["rendered"])
            continue
        if not old:
            rest.append(m["rendered"])
            continue
        c = cands(kinds, old, owner, sp["file_name"])
        if len(c) != 1:
            rest.append(f"[{old}: {c}] " + m["rendered"])
            continue
        new = c.pop()
        line = sp["line_start"]
        a, b = sp["column_start"] - 1, sp["column_end"] - 1
        t = sp["text"][0]["text"] if sp.get("text") else ""
        seg = t[a:b] if sp["line_start"] == sp["line_end"] else t[a:]
        i = re.search(r"\b%s\b" % re.escape(old), seg)
        if not i:
            i = re.search(r"\b%s\b" % re.escape(old), t)
            a = 0
            if not i:
                rest.append(f"[{old}->{new}] " + m["rendered"])
                continue
        if code in ("E0560", "E0559", "E0026") and not t[a + i.end() :].lstrip().startswith(":"):
            new = f"{new}: {old}"
        fixes[sp["file_name"]][(line, a + i.start())] = (old, new)
    n = 0
    for f, fx in fixes.items():
        ls = pathlib.Path(f).read_text().split("\n")
        for (line, col), (old, new) in sorted(fx.items(), reverse=True):
            l = ls[line - 1]
            if l[col : col + len(old)] == old:
                ls[line - 1] = l[:col] + new + l[col + len(old) :]
                n += 1
        pathlib.Path(f).write_text("\n".join(ls))
    print("round", rnd, "fixed", n, "rest", len(rest), flush=True)
    if not n:
        break
open("target/renames/rest.txt", "w").write("\n".join(rest))
