# ruff: noqa: B007, B023, D103, E402, E501, E731, E741, RET503, SIM115, T201
"""Applies a rename map through rust-analyzer. Usage: ra_rename.py ROOT MAP.jsonl... [--kinds type,fn] -> report on stdout"""

import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.parse

root = pathlib.Path(sys.argv[1]).resolve()
maps = [a for a in sys.argv[2:] if a.endswith(".jsonl")]
kinds = set(
    next(
        (a.split("=")[1] for a in sys.argv if a.startswith("--kinds=")),
        "type,fn,method,field,variant,const,arg,param,mod",
    ).split(",")
)
RA = os.environ.get("RA", "rust-analyzer")
entries = []
for m in maps:
    for l in open(m):
        if l.strip():
            d = json.loads(l)
            if (
                d["kind"] in kinds
                and d["at"].endswith(".rs")
                and d["at"].startswith(("rust/", "tests/", "benches/"))
                and d.get("owner") not in ("string literal", "metric name", "command line")
                and not (d["kind"] == "variant" and d["old"] == "shared")
                and d["kind"] != "mod"
                and not d.get("why", "").startswith("pyclass name")
            ):
                entries.append(d)
p = subprocess.Popen([RA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
ids = iter(range(1, 10**9))
replies = {}
events = queue.Queue()
cond = threading.Condition()


def send(o):
    b = json.dumps(o).encode()
    p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b)
    p.stdin.flush()


def reader():
    while True:
        n = None
        while True:
            line = p.stdout.readline()
            if not line:
                return
            if line in (b"\r\n", b"\n"):
                break
            if line.lower().startswith(b"content-length"):
                n = int(line.split(b":")[1])
        o = json.loads(p.stdout.read(n))
        if "method" in o and "id" in o:
            res = None
            if o["method"] == "workspace/configuration":
                res = [CONFIG for _ in o["params"]["items"]]
            send({"jsonrpc": "2.0", "id": o["id"], "result": res})
        elif "method" in o:
            events.put(o)
        else:
            with cond:
                replies[o["id"]] = o
                cond.notify_all()


CONFIG = {
    "cargo": {
        "buildScripts": {"enable": False},
        "sysroot": os.environ.get("RA_SYSROOT", "discover"),
        "sysrootSrc": os.environ.get("RA_SRC"),
    },
    "checkOnSave": False,
    "procMacro": {"enable": False},
    "cachePriming": {"enable": False},
    "files": {"watcher": "client", "excludeDirs": ["target", ".venv"]},
    "diagnostics": {"enable": False},
    "rename": {"allowExternalItems": False},
}
threading.Thread(target=reader, daemon=True).start()


def request(method, params, timeout=300):
    i = next(ids)
    send({"jsonrpc": "2.0", "id": i, "method": method, "params": params})
    end = time.time() + timeout
    with cond:
        while i not in replies:
            if not cond.wait(max(0.01, end - time.time())) and time.time() > end:
                raise TimeoutError(method)
        return replies.pop(i)


def notify(method, params):
    send({"jsonrpc": "2.0", "method": method, "params": params})


uri = lambda f: (root / f).as_uri()
r = request(
    "initialize",
    {
        "processId": os.getpid(),
        "rootUri": root.as_uri(),
        "workspaceFolders": [{"uri": root.as_uri(), "name": "x"}],
        "initializationOptions": CONFIG,
        "capabilities": {
            "workspace": {
                "configuration": True,
                "workspaceEdit": {"documentChanges": True, "resourceOperations": ["rename"]},
                "didChangeWatchedFiles": {"dynamicRegistration": True},
            },
            "textDocument": {"rename": {"prepareSupport": True}},
            "experimental": {"serverStatusNotification": True},
            "window": {"workDoneProgress": True},
        },
    },
)
notify("initialized", {})
t0 = time.time()
while True:
    try:
        e = events.get(timeout=600)
    except queue.Empty:
        print("no status")
        break
    if e["method"] == "experimental/serverStatus" and e["params"].get("quiescent"):
        print("ready", round(time.time() - t0), e["params"], flush=True)
        break
text = {}


def lines_of(f):
    return (root / f).read_text()


def find(d, src):
    """Returns the offset of the definition's name."""
    k, old, owner = d["kind"], re.escape(d["old"]), d.get("owner")
    if k == "type":
        pats = [rf"\b(?:struct|enum|trait|type|union)\s+({old})\b"]
    elif k == "const":
        pats = [rf"\b(?:const|static)\s+(?:mut\s+)?({old})\b"]
    elif k in ("fn",) or k == "method":
        pats = [rf"\bfn\s+({old})\b"]
    elif k == "mod":
        pats = [rf"\bmod\s+({old})\b"]
    elif k == "variant":
        pats = [rf"^\s*({old})\b\s*[,({{=]?"]
    elif k == "field":
        pats = [rf"^\s*(?:pub(?:\([^)]*\))?\s+)?({old})\s*:", rf"[{{,(]\s*(?:pub(?:\([^)]*\))?\s+)?({old})\s*:"]
    elif k in ("arg", "param"):
        fn = owner.split("::")[-1]
        pats = [rf"\bfn\s+{re.escape(fn)}\b[^{{;]*?[(,]\s*(?:mut\s+)?({old})\s*:"]
    region = (0, len(src))
    if k in ("variant", "field") and owner:
        m = re.search(rf"\b(?:struct|enum|union)\s+{re.escape(owner)}\b", src)
        if m:
            region = (m.end(), len(src))
    if k == "method" and owner:
        for m in re.finditer(
            rf"^(\s*)(?:unsafe )?(?:impl\b[^{{]*\b{re.escape(owner)}\b[^{{]*|(?:pub(?:\([^)]*\))? )?(?:unsafe )?trait {re.escape(owner)}\b[^{{]*)\{{",
            src,
            re.M,
        ):
            endm = re.compile(rf"^{m.group(1)}\}}", re.M).search(src, m.end())
            mm = re.compile(pats[0]).search(src, m.end(), endm.start() if endm else len(src))
            if mm:
                return mm.start(1)
    for pat in pats:
        mm = re.compile(pat, re.M).search(src, *region)
        if mm:
            return mm.start(1)


def pos(src, off):
    line = src.count("\n", 0, off)
    col = len(src[src.rfind("\n", 0, off) + 1 : off].encode("utf-16-le")) // 2
    return {"line": line, "character": col}


def apply(edit):
    changed = {}
    for c in edit.get("documentChanges") or []:
        if "kind" in c:
            changed.setdefault("__ops", []).append(c)
            continue
        f = urllib.parse.unquote(urllib.parse.urlparse(c["textDocument"]["uri"]).path)
        changed.setdefault(f, []).extend(c["edits"])
    for f, e in (edit.get("changes") or {}).items():
        changed.setdefault(urllib.parse.unquote(urllib.parse.urlparse(f).path), []).extend(e)
    n = 0
    for f, edits in changed.items():
        if f == "__ops":
            continue
        src = pathlib.Path(f).read_text()
        starts = [0]
        for l in src.split("\n"):
            starts.append(starts[-1] + len(l) + 1)

        def off(q):
            b = starts[q["line"]]
            l = src[b : starts[q["line"] + 1] - 1]
            return b + len(l.encode("utf-16-le")[: 2 * q["character"]].decode("utf-16-le"))

        for e in sorted(
            edits, key=lambda e: (e["range"]["start"]["line"], e["range"]["start"]["character"]), reverse=True
        ):
            src = src[: off(e["range"]["start"])] + e["newText"] + src[off(e["range"]["end"]) :]
            n += 1
        pathlib.Path(f).write_text(src)
    fs = [f for f in changed if f != "__ops"]
    notify("workspace/didChangeWatchedFiles", {"changes": [{"uri": pathlib.Path(f).as_uri(), "type": 2} for f in fs]})
    return n, fs, changed.get("__ops")


import collections

edits = collections.defaultdict(dict)
problems = []
comments = []


def add(path, e, d):
    r = e["range"]
    k = (r["start"]["line"], r["start"]["character"], r["end"]["line"], r["end"]["character"])
    was = edits[path].get(k)
    new = e["newText"]
    if was is None or was == new:
        edits[path][k] = new
        return
    a, b = (was, new) if was.endswith(": " + d["old"]) else (new, was)
    src = pathlib.Path(path).read_text().split("\n")[k[0]][k[1] : k[3]]
    if a.endswith(": " + src) and b.startswith(src + ": "):
        f, p_ = a[: -len(": " + src)], b[len(src + ": ") :]
        edits[path][k] = f if f == p_ else f + ": " + p_
    else:
        problems.append((d, f"conflict {path}:{k[0] + 1} {was!r} {new!r}"))


for i, d in enumerate(entries):
    src = lines_of(d["at"])
    off = find(d, src)
    if off is None:
        problems.append((d, "not found"))
        continue
    try:
        for attempt in range(8):
            r = request(
                "textDocument/rename",
                {"textDocument": {"uri": uri(d["at"])}, "position": pos(src, off), "newName": d["new"]},
                120,
            )
            if r.get("error", {}).get("code") != -32801:
                break
            time.sleep(0.05)
    except TimeoutError:
        problems.append((d, "timeout"))
        continue
    if "error" in r or not r.get("result"):
        problems.append((d, str(r.get("error"))))
        continue
    n = 0
    for c in r["result"].get("documentChanges") or []:
        if "kind" in c:
            problems.append((d, "operation " + str(c)))
            continue
        f = urllib.parse.unquote(urllib.parse.urlparse(c["textDocument"]["uri"]).path)
        for e in c["edits"]:
            add(f, e, d)
            n += 1
    for f, es in (r["result"].get("changes") or {}).items():
        f = urllib.parse.unquote(urllib.parse.urlparse(f).path)
        for e in es:
            add(f, e, d)
            n += 1
    if i % 50 == 0:
        print(i, len(entries), round(time.time() - t0), len(problems), flush=True)
total = 0
for f, es in edits.items():
    ls = pathlib.Path(f).read_text().split("\n")
    last = None

    def off16(line, ch):
        return len(ls[line].encode("utf-16-le")[: 2 * ch].decode("utf-16-le"))

    for (l0, c0, l1, c1), t in sorted(es.items(), reverse=True):
        if last is not None and (l1, c1) > last:
            problems.append(({"kind": "overlap"}, f"{f}:{l0 + 1} {t!r}"))
            continue
        a = off16(l0, c0)
        b = off16(l1, c1)
        if l0 == l1:
            ls[l0] = ls[l0][:a] + t + ls[l0][b:]
        else:
            ls[l0 : l1 + 1] = (ls[l0][:a] + t + ls[l1][b:]).split("\n")
        last = (l0, c0)
        total += 1
    pathlib.Path(f).write_text("\n".join(ls))
with open("target/renames/rust_problems.txt", "w") as o:
    for d, w in problems:
        o.write(json.dumps(d) + "  " + w + "\n")
print("done", len(entries), "edits", total, "files", len(edits), "problems", len(problems), round(time.time() - t0))
p.kill()
