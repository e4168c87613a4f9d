"""Files that users take for their clusters: what can run here runs, and the rest is read by the tools that will read it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import FOLDER, TIMEOUT_S, Stage, simulated_node
from simdriver import MIB

ROOT = FOLDER.parents[2]
DEPLOY = ROOT / "deploy"
PACKAGE_BIN = Path(sublet.__file__).parent / "bin"
#: Labels that Prometheus adds.
SCRAPED = {"instance", "job"}
SAMPLE = re.compile(r"(?P<name>\w+)\{(?P<labels>.*)\} \S+")
LABEL = re.compile(r'(\w+)="')


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return [dict(found) for found in yaml.safe_load_all(path.read_text())]


def output_of(*command: object, **variables: str) -> str:
    """What a program prints, which succeeds."""
    words = [str(word) for word in command]
    ran = subprocess.run(words, env={**os.environ, **variables}, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def documented() -> dict[str, set[str]]:
    """Each metric's labels, by the table of the documents."""
    rows = re.findall(r"^\| (`sublet_.*?) \| (.*?) \|", (ROOT / "docs/seeing.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for names, labels in rows for name in re.findall(r"`(\w+)`", names)}


def printed(stage: Stage) -> dict[str, set[str]]:
    """The labels of all metrics that `sublet metrics` prints; one that has no value here is not printed."""
    found: dict[str, set[str]] = {}
    for line in output_of(PACKAGE_BIN / "sublet", "metrics", **stage.environment()).splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is not None:
            found.setdefault(sample["name"], set()).update(LABEL.findall(sample["labels"]))
    return found


def test_documented_metrics_are_those_that_are_printed(stage: Stage, tmp_path: Path) -> None:
    node = simulated_node(tmp_path / "node", 256 * MIB)
    worker = stage.worker("train", SUBLET_BUDGET="128MiB", **node)
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    for change in ["pause", "resume"]:
        output_of(PACKAGE_BIN / "sublet", change, "train", **stage.environment())
    known, found = documented(), printed(stage)
    assert len(found) >= 10
    assert found == {name: known[name] for name in found}
    # The rest has values on other machines: with NVIDIA's management library, and with memory that no pause moves.
    others = {"sublet_gpu_used_bytes", "sublet_gpu_total_bytes", "sublet_left_bytes", "sublet_outside_bytes", "sublet_staying_bytes"}
    assert set(known) - set(found) == others


def test_metrics_are_what_another_parser_reads(stage: Stage) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus-client is not installed")
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB)")
    output_of(PACKAGE_BIN / "sublet", "pause", "train", **stage.environment())
    page = output_of(PACKAGE_BIN / "sublet", "metrics", **stage.environment())
    families = {family.name: family for family in parser.text_string_to_metric_families(page)}
    [last] = [sample for sample in families["sublet_pause_seconds"].samples if sample.labels.get("le") == "+Inf"]
    assert last.value == 1


def check(expression: str) -> None:
    """An expression is PromQL, and asks for what there is: by name and by label."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    known = documented()
    # Grafana puts its own values there.
    parsed = promql.parse(expression.replace("$__rate_interval", "5m"))
    selectors = list(_selectors(parsed))
    assert selectors, expression
    for selector in selectors:
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= known[selector.name] | SCRAPED, f"{selector.name} has no {asked - known[selector.name]}"
    labels = set.union(*(known[selector.name] for selector in selectors)) | SCRAPED
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(grouped.split(", ")) <= labels, f"{expression}: {grouped}"


def _selectors(parsed: Any) -> Iterator[Any]:
    if hasattr(parsed, "matchers"):
        yield parsed
    for part in ["lhs", "rhs", "expr", "vector_selector"]:
        if hasattr(parsed, part):
            yield from _selectors(getattr(parsed, part))
    for argument in getattr(parsed, "args", []):
        yield from _selectors(argument)


def test_alerts_ask_for_what_sublet_metrics_prints() -> None:
    rules = [rule for group in documents(DEPLOY / "prometheus/alerts.yml")[0]["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        check(rule["expr"])
        assert rule["annotations"]["summary"]
    [scrape] = documents(DEPLOY / "prometheus/scrape.yml")
    assert scrape["rule_files"] == ["alerts.yml"]


def test_board_asks_for_what_sublet_metrics_prints() -> None:
    board = json.loads((DEPLOY / "grafana/sublet.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) >= 8
    for expression in expressions:
        check(expression)
    for variable in board["templating"]["list"][1:]:
        asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
        assert asked is not None and asked[2] in documented()[asked[1]] | SCRAPED


def test_manifests_are_what_kubernetes_reads() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = [document for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for document in documents(path)]
    assert {document["kind"] for document in found} == {"ConfigMap", "Job"}
    for document in found:
        kubernetes.validate(document, "1.30", strict=True)


def test_containers_run_commands_that_there_are(stage: Stage) -> None:
    """Each `sublet` command of the manifests, up to the program that it starts, is one that the command takes."""
    for job in documents(DEPLOY / "kubernetes/two-jobs.yaml"):
        for container in job["spec"]["template"]["spec"]["containers"]:
            command = container["command"]
            assert command[0] == "sublet" and "--" in command
            options = command[1 : command.index("--")]
            said = output_of(PACKAGE_BIN / "sublet", *options, "--", "echo", "started", **stage.environment())
            assert said == "started\n"
            assert {"name": "SUBLET_REQUIRED", "value": "1"} in container["env"]


def test_containers_see_their_users_directory_alone_and_gain_no_rights() -> None:
    own_part = {"name": "node", "mountPath": "/run/sublet", "subPath": "1000"}
    for job in documents(DEPLOY / "kubernetes/two-jobs.yaml"):
        spec = job["spec"]["template"]["spec"]
        assert spec["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000}
        [maker, *others] = spec["initContainers"] + spec["containers"]
        closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        for container in others:
            assert container["volumeMounts"] == [own_part]
            assert {"name": "SUBLET_RUN_DIR", "value": "/run/sublet"} in container["env"]
            assert container["securityContext"] == {"runAsNonRoot": True, **closed}
        assert maker["volumeMounts"] == [{"name": "node", "mountPath": "/node"}]
        assert maker["securityContext"] == {"runAsUser": 0, **closed, "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}


def test_directory_that_the_init_container_makes_is_one_that_is_accepted(tmp_path: Path, stage: Stage) -> None:
    [job, _] = documents(DEPLOY / "kubernetes/two-jobs.yaml")
    script = job["spec"]["template"]["spec"]["initContainers"][0]["command"][2]
    assert "/node/1000" in script
    # The user who runs the tests stands for the job's.
    user = f"{os.getuid()}:{os.getgid()}"
    # The second pod finds it.
    for _ in range(2):
        output_of("sh", "-c", script.replace("/node/1000", str(tmp_path / "1000")).replace("1000:1000", user))
    variables = {**stage.environment(), "SUBLET_RUN_DIR": str(tmp_path / "1000")}
    assert json.loads(output_of(PACKAGE_BIN / "sublet", "ps", "--json", **variables))["tenants"] == []


def test_image_runs_commands_that_there_are() -> None:
    text = (ROOT / "Dockerfile").read_text()
    entry, command, health = (
        json.loads(found[1])
        for found in (re.search(pattern, text, re.MULTILINE) for pattern in [r"^ENTRYPOINT (.*)", r"^CMD (.*)", r"^HEALTHCHECK .* CMD (.*)"])
        if found is not None
    )
    assert entry == ["sublet"] and health[0] == "sublet"
    for words in [command, health[1:]]:
        output_of(PACKAGE_BIN / "sublet", *words, "--help")


def test_unit_is_what_systemd_reads(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = tmp_path / ".local/bin/sublet"
    command.parent.mkdir(parents=True)
    command.symlink_to(PACKAGE_BIN / "sublet")
    words = ["systemd-analyze", "--user", "--man=no", "verify", str(DEPLOY / "systemd/sublet-metrics.service")]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    ran = subprocess.run(words, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


@pytest.mark.parametrize("has_room", [True, False])
def test_paused_job_ends_by_its_own_handler(stage: Stage, tmp_path: Path, has_room: bool) -> None:
    node = simulated_node(tmp_path / "node", 64 * MIB)
    job, note, saved = stage.worker("train", **node), tmp_path / "handled", tmp_path / "saved"
    job.do("memory = simdriver.allocate(40 * MIB, fill=7)")
    job.do(f"import signal; signal.signal(signal.SIGTERM, lambda *_: open({str(note)!r}, 'w').close())")
    output_of(PACKAGE_BIN / "sublet", "pause", "train", **stage.environment(), **node)
    other = stage.worker("urgent", **node)
    if not has_room:
        other.do("memory = simdriver.allocate(40 * MIB)")
    path = {"PATH": f"{PACKAGE_BIN}:{os.environ['PATH']}"}
    words = ["sh", str(DEPLOY / "slurm/preempt.sh"), "train", str(saved), "200ms"]
    environment = {**stage.environment(), **node, **path}
    ran = subprocess.run(words, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    assert saved.exists() is not has_room
    if not has_room:
        other.do("memory.free()")
        output_of(PACKAGE_BIN / "sublet", "resume", "train", **stage.environment(), **node)
    # The handler runs before the next line is read.
    assert job.do("memory.read() == b'\\x07' * 40 * MIB") is True
    assert note.exists()


@pytest.fixture
def slurm(stage: Stage, tmp_path: Path) -> dict[str, str]:
    """Slurm's commands as far as the scripts use them, on one node; the scheduler does not answer."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": 'while [ "${1#--}" != "$1" ]; do case "$1" in --jobid) shift 2 ;; *) shift ;; esac; done; exec "$@"',
        "squeue": "exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return {
        **stage.environment(),
        "PATH": os.pathsep.join([str(programs), str(PACKAGE_BIN), os.environ["PATH"]]),
        "SUBLET_SLURM_ROOT": str(tmp_path / "run"),
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_ID": "4711",
        "SLURMD_NODENAME": "node1",
    }


def test_slurm_scripts_give_the_jobs_of_a_user_one_directory(slurm: dict[str, str], tmp_path: Path) -> None:
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    said = output_of(DEPLOY / "slurm/task-prolog.sh", **slurm)
    place = tmp_path / "run" / str(os.getuid())
    assert said == f"export SUBLET_RUN_DIR={place}\nexport SUBLET_REQUIRED=1\n"
    # Also when the directory is there already.
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    variables = {**slurm, "SUBLET_RUN_DIR": str(place)}
    assert output_of("sublet", "ps", **variables).startswith("no tenant is running")
    # The next job is being set up: no scheduler lists it as running.
    output_of(DEPLOY / "slurm/prolog.sh", **{**slurm, "SLURM_JOB_ID": "4712"})
    assert "another job has it" in end_of_job(slurm, "4711")
    assert "not made for this job" in end_of_job(slurm, "4711")
    assert place.is_dir()
    assert "is removed" in end_of_job(slurm, "4712")
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["jobs"]


def end_of_job(slurm: dict[str, str], job: str, **variables: str) -> str:
    """What the epilog of a job says, which succeeds whatever happens, and needs none of our variables."""
    environment = {**{name: slurm[name] for name in ["SUBLET_SLURM_ROOT", "SLURM_JOB_UID"]}, "SLURM_JOB_ID": job, "PATH": "", **variables}
    ran = subprocess.run([DEPLOY / "slurm/epilog.sh"], env=environment, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert (ran.returncode, ran.stdout) == (0, "")
    return ran.stderr


def test_slurm_directory_that_a_living_process_has_stays(slurm: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "run" / str(os.getuid())
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**slurm, "SUBLET_RUN_DIR": str(place)}) as process:
        assert "a living process" in end_of_job(slurm, "4711")
        process.communicate(timeout=TIMEOUT_S)
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "0.sock"))
        listener.listen()
        assert "a living process" in end_of_job(slurm, "4711")
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    assert "is removed" in end_of_job(slurm, "4711")
    assert not place.exists()


def test_slurm_epilog_follows_no_name_of_a_users(slurm: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    place = tmp_path / "run" / str(os.getuid())
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    for name in ["-rf", "a\nb", "* .", "$(exit 3)", "jobs", "gone.4711", "4712"]:
        (place / name).mkdir()
    (place / "link").symlink_to(kept)
    (place / "jobs" / "..up").symlink_to("../../../kept")
    assert "is removed" in end_of_job(slurm, "4711")
    assert not place.exists() and (kept / "file").read_text() == "kept"


def test_slurm_epilog_never_fails(slurm: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "run" / str(os.getuid())
    assert "jobs/lock" in end_of_job(slurm, "4711"), "there is no directory at all"
    output_of(DEPLOY / "slurm/prolog.sh", **slurm)
    for job in ["", "..", "4711/../..", "*", "-1", "4711:4712"]:
        assert "no numbers" in end_of_job(slurm, job), job
        assert "no numbers" in end_of_job(slurm, "4711", SLURM_JOB_UID=job), job
    # What a cleaner has left.
    (tmp_path / "run/jobs/gone.4711/x").mkdir(parents=True)
    assert "cannot be moved" in end_of_job(slurm, "4711")
    assert place.is_dir()


def test_slurm_job_is_suspended_off_its_gpu_and_resumed(slurm: dict[str, str], stage: Stage, tmp_path: Path) -> None:
    worker = stage.worker("job-4711", **simulated_node(tmp_path / "node", 64 * MIB))
    worker.do("memory = simdriver.allocate(48 * MIB, fill=7)")
    output_of(DEPLOY / "slurm/sublet-job", "suspend", "4711", **slurm)
    [tenant] = json.loads(output_of("sublet", "ps", "--json", **slurm))["tenants"]
    assert [process["member"]["state"] for process in tenant["members"]] == ["paused"]
    output_of(DEPLOY / "slurm/sublet-job", "resume", "4711", **slurm)
    assert worker.do("memory.read() == b'\\x07' * 48 * MIB") is True
    ran = subprocess.run([DEPLOY / "slurm/sublet-job", "stop", "4711"], env=slurm, timeout=TIMEOUT_S)
    assert ran.returncode == 2


def test_every_script_is_one_that_can_run() -> None:
    for script in sorted((DEPLOY / "slurm").iterdir()):
        assert os.access(script, os.X_OK), script
        output_of("sh", "-n", script)


def test_files_of_github_fit_their_schemas() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    check_schema = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    config = ROOT / ".github/ISSUE_TEMPLATE/config.yml"
    output_of(*check_schema, "vendor.github-workflows", *sorted((ROOT / ".github/workflows").glob("*.yml")))
    output_of(*check_schema, "vendor.github-issue-forms", *[form for form in forms if form != config])
    output_of(*check_schema, "vendor.github-issue-config", config)
    output_of(*check_schema, "vendor.citation-file-format", ROOT / "CITATION.cff")
