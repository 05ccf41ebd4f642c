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
    wanted = set(case.path_parameters or ()) - {"name"}
    fitting = [run for run in runs if wanted <= set(run)] if wanted else runs
    if not fitting:
        return
    run = fitting[number % len(fitting)]
    for name in wanted:
        case.path_parameters[name] = run[name]
    if number % 5 == 0:
        return
    # What a caller has to know is right, and nothing is asked for that agents do not have.
    if case.headers:
        case.headers.pop("If-Match", None)
    if isinstance(case.query, dict):
        case.query.pop("wait", None)
        if "revision" in wanted:
            case.query["digest"] = run["digest"]
    if isinstance(case.body, dict):
        for name in ("state_overlay", "resume_target", "flow", "deadline", "budgets"):
            case.body.pop(name, None)
        if case.operation.path.endswith(("/resume", "/evaluate")):
            case.body["resume_token"] = run["resume_token"]
        for name in case.body:
            if name in run:
                case.body[name] = run[name]
            if name in ("decision_id", "delivery_id", "cancel_id"):
                case.body[name] = f"d-{number}"
        if "agent" in case.body and "input" in case.body:
            case.body["agent"] = KNOWN["agent"]


def harmless(value):
    if isinstance(value, dict):
        return {k: NOWHERE if k == "url" and isinstance(v, str) and v else harmless(v) for k, v in value.items()}
    if isinstance(value, list):
        return [harmless(item) for item in value]
    return value

