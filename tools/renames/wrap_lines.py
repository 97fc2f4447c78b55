# ruff: noqa: D100, E401, E741, F401, I001, T201
import re, pathlib, collections, os, subprocess


def long_lines():
    """Returns the numbers of lines that ruff finds too long, by file."""
    out = subprocess.run(
        [".venv/bin/ruff", "check", "-q", "--select", "E501", "--output-format", "concise"],
        capture_output=True,
        text=True,
    ).stdout
    by = collections.defaultdict(list)
    for l in out.splitlines():
        m = re.match(r"(.+?):(\d+):\d+: E501", l)
        if m:
            by[m[1]].append(int(m[2]))
    return by


for f, nums in long_lines().items():
    ls = pathlib.Path(f).read_text().split("\n")
    for n in sorted(nums, reverse=True):
        i = n - 1
        while len(ls[i]) > 132:
            l = ls[i]
            ind = re.match(r"\s*", l)[0]
            com = "# " if l.strip().startswith("# ") else ""
            if '"""' in l and l.strip().startswith('"""') and l.rstrip().endswith('"""') and not com:
                print("MANUAL", f, n, l)
                break
            if not com and (re.search(r'[=({]\s*$|f"|^\s*(def|return|raise|if|for|class)\b|noqa', l)):
                print("MANUAL", f, n, l)
                break
            cut = l.rfind(" ", 0, 133)
            head, rest = l[:cut].rstrip(), l[cut + 1 :]
            # continuation indent
            nxt = ls[i + 1] if i + 1 < len(ls) else ""
            ni = re.match(r"\s*", nxt)[0]
            islist = re.match(r"\s*(- |\w+: )", l)
            same = (
                nxt.strip()
                and '"""' not in nxt
                and not re.match(r"\s*(- |#|[a-z_]+: |[A-Z]\w+:)", nxt)
                and (ni == ind or (islist and len(ni) > len(ind)))
                if not com
                else nxt.startswith(ind + "# ")
            )
            if same:
                ls[i] = head
                body = nxt.strip()[2:] if com else nxt.strip()
                ls[i + 1] = ni + com + rest + " " + body
                i += 1
            else:
                ls[i] = head
                ls.insert(
                    i + 1,
                    (ind if not islist or com else ind + ("  " if l.strip().startswith("- ") else "    ")) + com + rest,
                )
                i += 1
    pathlib.Path(f).write_text("\n".join(ls))

for f, nums in long_lines().items():
    ls = pathlib.Path(f).read_text().split("\n")
    for n in sorted(nums, reverse=True):
        l = ls[n - 1]
        ind = re.match(r"\s*", l)[0]
        t = l.strip()
        m = re.match(r'^(f?)"(.*)"(\)?,?)$', t)
        if t.startswith('"""') and t.endswith('"""'):
            body = t[3:-3]
            k = body.rfind(". ", 0, 120)
            if k > 0:
                ls[n - 1 : n] = [ind + '"""' + body[: k + 1], "", ind + body[k + 2 :], ind + '"""']
            else:
                k = body.rfind(", ", 0, 110)
                print("DOC", f, n, body)
        elif m:
            body = m[2]
            k = body.rfind(" ", 0, 100)
            # not within braces
            while body[:k].count("{") != body[:k].count("}"):
                k = body.rfind(" ", 0, k)
            ls[n - 1 : n] = [ind + m[1] + '"' + body[: k + 1] + '"', ind + m[1] + '"' + body[k + 1 :] + '"' + m[3]]
        else:
            print("MANUAL", f, n, l)
    pathlib.Path(f).write_text("\n".join(ls))
