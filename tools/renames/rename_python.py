# ruff: noqa: D101, D102, D103, E401, E741, F841, I001, PERF401, SIM115, T201, UP031
"""Collects the edits of a rename map from basedpyright's language server, all against one snapshot, and applies them at once."""

import ast, json, os, pathlib, subprocess, sys, threading, time, collections, urllib.parse

ROOT = pathlib.Path(sys.argv[1]).resolve()
MAPS = sys.argv[2:]
SERVER = ".venv/bin/basedpyright-langserver"


class Server:
    def __init__(self):
        self.p = subprocess.Popen(
            [SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        self.id = 0
        self.answers = {}
        self.cv = threading.Condition()
        threading.Thread(target=self.reader, daemon=True).start()

    def send(self, m):
        b = json.dumps({"jsonrpc": "2.0", **m}).encode()
        self.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b)
        self.p.stdin.flush()

    def reader(self):
        f = self.p.stdout
        while True:
            n = 0
            while True:
                line = f.readline()
                if not line:
                    return
                if line.lower().startswith(b"content-length"):
                    n = int(line.split(b":")[1])
                if line == b"\r\n":
                    break
            m = json.loads(f.read(n))
            if "method" in m and "id" in m:
                r = None
                if m["method"] == "workspace/configuration":
                    r = [
                        {"pythonPath": ".venv/bin/python", "analysis": {"diagnosticMode": "openFilesOnly"}}
                        if i.get("section", "").startswith("python")
                        else {}
                        for i in m["params"]["items"]
                    ]
                self.send({"id": m["id"], "result": r})
            elif "id" in m:
                with self.cv:
                    self.answers[m["id"]] = m
                    self.cv.notify_all()

    def ask(self, method, params, timeout=600):
        self.id += 1
        i = self.id
        self.send({"id": i, "method": method, "params": params})
        with self.cv:
            if not self.cv.wait_for(lambda: i in self.answers, timeout):
                return {"error": "timeout"}
            return self.answers.pop(i)

    def tell(self, method, params):
        self.send({"method": method, "params": params})


def name_pos(lines, node, name):
    """Returns the 0-based position of `name` at or after the start of node."""
    line = node.lineno - 1
    col = len(lines[line].encode()[: node.col_offset].decode())
    import re

    for k in range(line, min(line + 60, len(lines))):
        m = re.compile(r"\b%s\b" % re.escape(name)).search(lines[k], col if k == line else 0)
        if m:
            return k, m.start()
    return None


def find(tree, lines, kind, owner, old):
    scopes = [tree]
    if owner:
        for part in owner.replace("::", ".").split("."):
            nxt = []
            for s in scopes:
                for n in ast.walk(s):
                    if (
                        n is not s
                        and isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                        and n.name == part
                    ):
                        nxt.append(n)
            scopes = nxt[:]
        if not scopes:
            return []
    out = []
    for s in scopes:
        if kind == "param":
            a = s.args if hasattr(s, "args") else None
            if a is None:
                continue
            for x in a.posonlyargs + a.args + a.kwonlyargs + [y for y in (a.vararg, a.kwarg) if y]:
                if x.arg == old:
                    out.append((x.lineno - 1, len(lines[x.lineno - 1].encode()[: x.col_offset].decode())))
            continue
        body = s.body if hasattr(s, "body") else []

        def visit(body):
            for n in body:
                if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    if n.name == old and kind in ("type", "fn", "method", "const"):
                        k = n.lineno - 1
                        import re

                        m = re.search(r"\b(class|def)\s+(%s)\b" % re.escape(old), lines[k])
                        if m:
                            out.append((k, m.start(2)))
                elif isinstance(n, (ast.Assign, ast.AnnAssign)):
                    for t in n.targets if isinstance(n, ast.Assign) else [n.target]:
                        for e in t.elts if isinstance(t, ast.Tuple) else [t]:
                            if isinstance(e, ast.Name) and e.id == old:
                                out.append((e.lineno - 1, len(lines[e.lineno - 1].encode()[: e.col_offset].decode())))
                elif hasattr(ast, "TypeAlias") and isinstance(n, ast.TypeAlias) and n.name.id == old:
                    out.append((n.name.lineno - 1, n.name.col_offset))
                elif isinstance(n, (ast.If, ast.Try, ast.With, ast.For)):
                    visit(n.body)
                    visit(getattr(n, "orelse", []))
                    for h in getattr(n, "handlers", []):
                        visit(h.body)

        visit(body)
        if not out and kind in ("field", "const", "method") and isinstance(s, ast.ClassDef):
            for n in ast.walk(s):
                if (
                    isinstance(n, ast.Attribute)
                    and n.attr == old
                    and isinstance(n.value, ast.Name)
                    and n.value.id in ("self", "cls")
                    and isinstance(n.ctx, ast.Store)
                ):
                    p = name_pos(lines, n, old)
                    k = n.end_lineno - 1
                    c = len(lines[k].encode()[: n.end_col_offset].decode()) - len(old)
                    out.append((k, c))
                    break
            if not out and "__slots__" in "".join(lines):
                pass
        if not out and kind in ("fn", "type", "method", "field", "const"):
            for n in ast.walk(s):
                if (
                    isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                    and n.name == old
                    and n is not s
                ):
                    import re

                    m = re.search(r"\b(class|def)\s+(%s)\b" % re.escape(old), lines[n.lineno - 1])
                    if m:
                        out.append((n.lineno - 1, m.start(2)))
    return out


def main():
    rows = []
    for f in MAPS:
        for l in open(f):
            r = json.loads(l)
            if (
                r["at"].startswith(("python/", "tests/", "examples/", "benches/"))
                and r.get("owner") not in ("string literal", "metric name", "command line")
                and r["kind"] not in ("mod", "variant", "arg")
            ):
                rows.append(r)
    s = Server()
    uri = ROOT.as_uri()
    s.ask(
        "initialize",
        {
            "processId": os.getpid(),
            "rootUri": uri,
            "workspaceFolders": [{"uri": uri, "name": "r"}],
            "capabilities": {
                "workspace": {"configuration": True, "workspaceEdit": {"documentChanges": True}},
                "textDocument": {"rename": {"prepareSupport": False}},
            },
        },
    )
    s.tell("initialized", {})
    edits = collections.defaultdict(dict)
    problems = []
    opened = set()
    start = time.time()
    for i, r in enumerate(rows):
        path = ROOT / r["at"]
        try:
            text = path.read_text()
        except OSError:
            problems.append((r, "no file"))
            continue
        lines = text.splitlines()
        pos = find(ast.parse(text), lines, r["kind"], r.get("owner"), r["old"])
        if not pos:
            problems.append((r, "not found"))
            continue
        for p in dict.fromkeys(pos):
            u = path.as_uri()
            if u not in opened:
                opened.add(u)
                s.tell(
                    "textDocument/didOpen",
                    {"textDocument": {"uri": u, "languageId": "python", "version": 1, "text": text}},
                )
            a = s.ask(
                "textDocument/rename",
                {"textDocument": {"uri": u}, "position": {"line": p[0], "character": p[1]}, "newName": r["new"]},
            )
            res = a.get("result")
            if not res:
                problems.append((r, str(a.get("error") or "no edits")))
                continue
            changes = []
            for d in res.get("documentChanges") or []:
                changes += [(d["textDocument"]["uri"], e) for e in d["edits"]]
            for du, es in (res.get("changes") or {}).items():
                changes += [(du, e) for e in es]
            for du, e in changes:
                q = pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(du).path))
                if q.suffix == ".ipynb":
                    problems.append((r, f"notebook {q.name}"))
                    continue
                if not q.is_relative_to(ROOT):
                    problems.append((r, f"edit outside {q}"))
                    continue
                k = (
                    e["range"]["start"]["line"],
                    e["range"]["start"]["character"],
                    e["range"]["end"]["line"],
                    e["range"]["end"]["character"],
                )
                was = edits[q].get(k)
                if was is not None and was != e["newText"]:
                    problems.append((r, f"conflict at {q.relative_to(ROOT)}:{k[0] + 1}: {was!r} or {e['newText']!r}"))
                else:
                    edits[q][k] = e["newText"]
        if i % 50 == 0:
            print(i, len(rows), round(time.time() - start), "s", len(problems), flush=True)
    json.dump(
        {str(q): [[*k, t] for k, t in e.items()] for q, e in edits.items()},
        open("target/renames/python_edits.json", "w"),
    )
    for q, e in edits.items():
        ls = q.read_text().split("\n")
        for (l0, c0, l1, c1), t in sorted(e.items(), reverse=True):
            assert l0 == l1, (q, l0)
            ls[l0] = ls[l0][:c0] + t + ls[l0][c1:]
        q.write_text("\n".join(ls))
    with open("target/renames/python_problems.txt", "w") as f:
        for r, w in problems:
            f.write(json.dumps(r) + "  " + w + "\n")
    print(
        "edits",
        sum(map(len, edits.values())),
        "files",
        len(edits),
        "problems",
        len(problems),
        round(time.time() - start),
        "s",
    )


main()
