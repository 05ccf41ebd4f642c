"""What schemathesis cannot guess: ids, tokens and digests of runs that exist, told by the test in a file.

Two of three generated requests are about one of these runs. Which one, and with which of its values, follows from the request itself,
so that a seed names a whole session. Addresses in declarations are turned to a closed port of the loopback address.
"""

import json
import os
import zlib

import schemathesis

with open(os.environ["FUZZ_KNOWN"], encoding="utf-8") as file:
    KNOWN = json.load(file)
NOWHERE = "http://127.0.0.1:9/"


@schemathesis.hook
def before_call(context, case, kwargs):
    operation = case.operation
    # A stream or a wait that nothing ends would last longer than the test.
    if isinstance(case.query, dict) and "timeout" in case.query:
        case.query["timeout"] = case.query["timeout"] if case.query["timeout"] == "" else "1s"
    if "/agents" in operation.path:
        case.body = harmless(case.body)
    said = json.dumps([operation.label, case.path_parameters, case.query, case.body], default=repr)
    number = zlib.crc32(said.encode())
    if number % 3 == 0:
        return
    about(case, KNOWN["spare" if ends(operation) else "runs"], number // 3)


def ends(operation):
    """Operations that leave nothing to do for the others."""
    return operation.method.upper() == "DELETE" or operation.path.endswith("/cancel")


def about(case, runs, number):
    wanted = set(case.path_parameters or ()) - {"revision", "name"}
    fitting = [run for run in runs if wanted <= set(run)] if wanted else runs
    if not fitting:
        return
    run = fitting[number % len(fitting)]
    for name in wanted:
        case.path_parameters[name] = run[name]
    if isinstance(case.body, dict):
        for name, value in case.body.items():
            if name in run and isinstance(value, str) and number % 5:
                case.body[name] = run[name]
        if "agent" in case.body and "input" in case.body and number % 5:
            case.body["agent"] = KNOWN["agent"]
            case.body.pop("flow", None)


def harmless(value):
    if isinstance(value, dict):
        return {k: NOWHERE if k == "url" and isinstance(v, str) and v else harmless(v) for k, v in value.items()}
    if isinstance(value, list):
        return [harmless(item) for item in value]
    return value
