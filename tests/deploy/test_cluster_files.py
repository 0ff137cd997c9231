"""The files in deploy/: the container image, the cluster files and the job scripts. They are checked as far as possible
without a cloud: by the schemas and linters of the tools that read them, and by our own commands and Ray's. A test is
skipped if its tool is not installed."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
IMAGES = {f"tokenmill:{PROJECT['version']}-{target}" for target in ("cpu", "cuda")}


def tool(name: str) -> str:
    """Return the path of a program from the extra `dev`: beside this Python, or on PATH. The test is skipped if there
    is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    return found or pytest.skip(f"{name} is not installed (pip install '.[dev]')")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def without(doc: Any, *path: Any, value: Any = None) -> Any:
    """Return a copy of `doc` without what is at `path`, or with `value` in its place."""
    doc = copy.deepcopy(doc)
    at = doc
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return doc


# -- the image -----------------------------------------------------------------------------------------------------
DOCKERFILE = DEPLOY / "Dockerfile"


def instructions() -> list[str]:
    """Return the instructions of the Dockerfile without comments, one per line."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.M)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_what_the_dockerfile_imports_is_there():
    text = DOCKERFILE.read_text()
    named = re.findall(r"-c \"from ([\w.]+) import (\w+)", text)
    assert len(named) >= 2
    for module, name in named:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_the_dockerfile_passes_hadolint():
    done = subprocess.run([tool("hadolint"), "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_would_say_it(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo apt-get install gcc\n")
    assert subprocess.run([tool("hadolint"), str(tmp_path / "Dockerfile")], stdout=subprocess.DEVNULL).returncode == 1


def test_both_targets_run_as_nobody_special():
    stages: dict[str, list[str]] = {}
    for line in instructions():
        if line.startswith("FROM "):
            stages[line.split(" AS ")[1]] = [line]
        elif stages:
            stages[next(reversed(stages))].append(line)
    for target in ("cpu", "cuda"):
        users = [line.split()[1] for line in stages[target] if line.startswith("USER")]
        assert users == ["1000:1000"]                    # a number: Kubernetes cannot tell that a name is not root
        assert not any(line.startswith("RUN") and "pip install" in line for line in stages[target])
        assert f"COPY --from=build-{target} /opt/venv /opt/venv" in stages[target]
        assert "COPY --from=models --chown=1000:1000 /opt/tokenmill /opt/tokenmill" in stages[target]
        assert stages[f"build-{target}"][0].startswith(f"FROM packages-{target} ")
        assert any("--force-reinstall /wheels/*.whl" in line for line in stages[f"build-{target}"])
    assert any("fetch lid176" in line for line in stages["models"])
    assert "build-essential" not in " ".join(instructions())


def test_the_image_is_pinned_and_names_no_registry():
    lines = instructions()
    for line in lines:
        assert not re.search(r"--(extra-)?index-url|trusted-host|https?://", line), line
        for command in re.findall(r"pip install [^&]*", line):
            assert "-c constraints.txt" in command or "--no-deps" in command, command
    [python] = [line.split("=", 1)[1] for line in lines if line.startswith("ARG PYTHON_IMAGE")]
    assert python.startswith("python:3.11-")             # what constraints.txt was resolved for
    sources = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert set(sources) - {line.split(" AS ")[1] for line in lines if line.startswith("FROM")} == {"${PYTHON_IMAGE}"}


def test_what_the_image_copies_is_there_and_not_ignored():
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [source for line in instructions() if line.startswith("COPY") and "--from" not in line
              for source in line.split()[1:-1]]
    assert set(copied) == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE",
                           "pipeline", "stages", "tokenizer", "trainer"}
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignore


# -- ray up --------------------------------------------------------------------------------------------------------
def ray_schema() -> dict[str, Any]:
    """Return the schema against which Ray itself checks these files (in
    `ray.autoscaler._private.util.validate_config`)."""
    ray = pytest.importorskip("ray")
    return json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


def ray_start_errors(arguments: list[str]) -> str:
    """Return the error message of `ray start` for these arguments, or "". Nothing is started."""
    click = pytest.importorskip("click")
    start = pytest.importorskip("ray.scripts.scripts").start
    try:
        start.make_context("start", list(arguments))
    except click.ClickException as e:
        return e.format_message()
    return ""


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_ray_accepts_the_cluster(cloud):
    jsonschema = pytest.importorskip("jsonschema")
    [doc] = documents(DEPLOY / "ray" / f"{cloud}.yaml")
    jsonschema.validate(doc, ray_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(doc | {"idle_timeout": 3}, ray_schema())
    from ray.autoscaler._private.util import fillout_defaults

    filled = fillout_defaults(copy.deepcopy(doc))         # with what Ray adds by itself for this cloud
    for commands in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        assert filled[commands] == []
    assert doc["docker"]["image"] in IMAGES
    assert doc["head_node_type"] in doc["available_node_types"]
    assert doc["available_node_types"]["head"]["resources"] == {"CPU": 0}
    options = " ".join(doc["docker"]["run_options"])
    assert "RAY_AUTH_MODE=token" in options
    [token] = doc["file_mounts"]
    assert f"RAY_AUTH_TOKEN_PATH={token}" in options


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("kind", ["head", "worker"])
def test_ray_knows_the_options_of_the_start_commands(cloud, kind):
    [doc] = documents(DEPLOY / "ray" / f"{cloud}.yaml")
    command = doc[f"{kind}_start_ray_commands"][-1].split("ray start", 1)[1]
    arguments = shlex.split(command)
    assert ray_start_errors(arguments) == ""
    assert "No such option" in ray_start_errors([*arguments, "--dashboard-hots=127.0.0.1"])
    if kind == "head":
        assert {"--head", "--num-cpus=0", "--dashboard-host=127.0.0.1"} <= set(arguments)


# -- Kubernetes ----------------------------------------------------------------------------------------------------
KUBE = sorted((DEPLOY / "kuberay").glob("*.yaml"))
OBJECTS = [pytest.param(doc, id=f"{path.stem}-{doc['kind']}") for path in KUBE for doc in documents(path)]
RAY_OBJECTS = [p for p in OBJECTS if p.values[0]["apiVersion"] == "ray.io/v1"]


def cluster_of(doc: dict[str, Any]) -> dict[str, Any]:
    return doc["spec"]["rayClusterSpec"] if doc["kind"] == "RayJob" else doc["spec"]


def groups_of(doc: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = cluster_of(doc)
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def kube_validate(doc: dict[str, Any]) -> None:
    kube = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kube.validate(doc, kube.latest_version(), strict=True)


@pytest.mark.parametrize("doc", [p for p in OBJECTS if p not in RAY_OBJECTS])
def test_kubernetes_accepts_the_object(doc):
    kube_validate(doc)
    with pytest.raises(Exception, match="bogus"):
        kube_validate(doc | {"bogus": 1})


@pytest.mark.parametrize("doc", RAY_OBJECTS)
def test_the_ray_object_has_only_fields_kuberay_knows(doc):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent / "kuberay.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(doc, schema)
    wrong = [without(doc, "spec", "bogus", value=1), without(doc, "metadata", "name", value="Not_A_Label")]
    if doc["kind"] == "RayJob":
        wrong += [without(doc, "spec", "shutdownAfterJobFinishes", value=False),
                  without(doc, "spec", "submissionMode", value="Sidecar"),
                  without(doc, "spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolicy",
                          value="Always")]
    for broken in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


@pytest.mark.parametrize("doc", RAY_OBJECTS)
def test_pods_of_the_ray_object_are_pods(doc):
    for group in groups_of(doc):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {"name": "x", **pod["metadata"]}
        kube_validate(pod)
        with pytest.raises(Exception, match="imagee"):
            kube_validate(without(pod, "spec", "containers", 0, "imagee", value="x"))
        [container] = pod["spec"]["containers"]
        assert container["image"] in IMAGES
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        # what Pod Security's `restricted` level asks for
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                                "capabilities": {"drop": ["ALL"]}}
        writable = {v["name"] for v in pod["spec"]["volumes"] if "emptyDir" in v}
        places = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        environment = {e["name"]: e["value"] for e in container["env"]}
        assert {places[environment["TMPDIR"]], places[environment["HOME"]], places["/tmp"]} <= writable
        mounts = {m["name"] for m in container["volumeMounts"]}
        assert mounts == {v["name"] for v in pod["spec"]["volumes"]}


def test_pods_reach_what_a_run_needs_and_no_credentials_of_the_machine():
    [policy] = documents(DEPLOY / "kuberay" / "network-policy.yaml")
    spec = policy["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    own, dns, https = spec["egress"]
    assert own == {"to": [{"podSelector": spec["podSelector"]}]}
    assert {(p["port"], p["protocol"]) for p in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert {p["port"] for p in https["ports"]} == {443, 6443}
    blocks = [to["ipBlock"] for to in https["to"]]
    allowed = [(ip_network(b["cidr"]), [ip_network(e) for e in b["except"]]) for b in blocks]

    def reached(address: str) -> bool:
        ip = ip_address(address)
        return any(ip in network and not any(ip in e for e in gaps) for network, gaps in allowed)

    assert reached("52.216.1.1") and reached("10.0.0.1") and reached("2600:1fa0::1")
    assert not reached("169.254.169.254") and not reached("fd00:ec2::254")


@pytest.mark.parametrize("doc", RAY_OBJECTS)
def test_the_cluster_is_ours(doc):
    cluster = cluster_of(doc)
    assert cluster["rayVersion"] == PINS["ray"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in groups_of(doc):
        assert ray_start_errors([f"--{k}={v}" for k, v in group["rayStartParams"].items()]) == ""
    assert all(g["minReplicas"] <= g["replicas"] <= g["maxReplicas"] for g in cluster["workerGroupSpecs"])


def test_the_job_runs_our_command_and_has_time_to_stop():
    [job] = documents(DEPLOY / "kuberay" / "rayjob.yaml")
    spec = job["spec"]
    command = shlex.split(spec["entrypoint"])
    assert command[:2] == ["tokenmill", "run"]
    from pipeline.cli.app import command_group

    run = command_group().commands["run"]
    context = run.make_context("run", command[2:])
    assert context.params["address"] == "auto"
    [mount] = [m for m in spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
               if m["name"] == "recipe"]
    assert str(context.params["recipe"]).startswith(mount["mountPath"] + "/")
    environment = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert int(environment["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert spec["backoffLimit"] >= 1 and spec["shutdownAfterJobFinishes"] is True


def test_the_training_job_asks_for_gpus_it_has_and_shares_its_run_with_all_pods(monkeypatch):
    pytest.importorskip("torch")
    from trainer.__main__ import parser

    [job] = documents(DEPLOY / "kuberay" / "train.yaml")
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:2] == ["tokenmill", "train"]
    options = parser("run").parse_args(command[2:])
    assert options.address == "auto" and not options.insecure_local
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    each = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["maxReplicas"] * each == options.gpus
    assert each <= options.least < options.gpus                     # the loss of a pod can be borne
    assert int(container["resources"]["requests"]["cpu"]) >= each   # a rank takes a CPU
    for group in groups_of(job):
        pod = group["template"]["spec"]
        assert {"name": "store", "persistentVolumeClaim": {"claimName": "store"}} in pod["volumes"]
        [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "store"]
        assert options.run.startswith(mount["mountPath"] + "/") and not mount.get("readOnly")
        assert pod["containers"][0]["image"].endswith("-cuda")      # the driver, too, needs torch
    patience = int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert patience >= 300
    environment = {e["name"]: e["value"] for e in container["env"]}
    drained = int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert 300 <= drained < workers["template"]["spec"]["terminationGracePeriodSeconds"]


# -- recipes for GPU nodes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "ranks", "gigabytes", "parameters", "hours"), [
    ("350m-1xh200", 1, 141, 0.36e9, (10, 14)), ("1b-8xh100", 8, 80, 1.07e9, (11, 15)),
    ("3b-4x8xh100", 32, 80, 3.0e9, (20, 30))])
def test_a_recipe_for_gpu_nodes_is_what_its_head_says(tmp_path, name, ranks, gigabytes, parameters, hours):
    """It loads, its curriculum resolves for shards of the size it names, the trainer takes it, and the sizes hold."""
    pytest.importorskip("torch")
    from pipeline.recipe import load_recipe
    from tokenizer.mixture.resolve import resolve
    from trainer.base.config import build
    from trainer.loop.config import TrainConfig
    from trainer.observe.mfu import step_flops

    path = DEPLOY / "train" / f"{name}.yaml"
    recipe = load_recipe(path, [], inputs=[str(tmp_path / "*.parquet")])
    config = build(TrainConfig, recipe.train, name)
    plain = yaml.safe_load(path.read_text())
    vocab = plain["tokenizer"]["train"]["vocab"]
    info = {"path": "x", "sha256": "a" * 64, "tokens": 0, "documents": 1, "bytes": 1}
    wanted = float(re.search(r"About (\d+) B tokens are needed", path.read_text())[1]) * 1e9
    shards = {"name": "corpus", "tokenizer": "t", "dtype": "uint16", "train": {**info, "tokens": int(wanted)},
              "val": {**info, "tokens": 10 ** 7}}
    curriculum, warnings = resolve(plain, {"corpus": shards},           # an error if the data did not suffice
                                   {"sha256": "t", "vocab_size": vocab, "eos": 0, "path": "x"})
    assert not warnings
    assert config.model.parameters(vocab) == pytest.approx(parameters, rel=0.05)
    assert config.compile and config.parallel.shape(ranks)
    speed = 989e12 * {1: 0.45, 8: 0.5, 32: 0.45}[ranks] * ranks
    assert hours[0] < sum(step_flops(config.model, vocab, p.tokens, p.tokens * p.sequence)
                          for p in curriculum.phases) / speed / 3600 < hours[1]
    for phase in curriculum.phases:
        assert phase.batch % ranks == 0 and phase.batch * phase.sequence % (ranks * config.micro_batch) == 0
    from trainer.loop.run import Run
    from trainer.tools.memory import FILL, estimate, micro_batch
    from trainer.tools.sizes import plan

    run = Run(tmp_path, tmp_path, tmp_path, curriculum, config)
    assert "anneal" in plan(run, ranks)
    rows, length, several = micro_batch(run, ranks)
    parts = estimate(config, vocab, ranks, rows * length, 2, several)
    assert sum(parts.values()) < FILL * gigabytes * 1e9
    said = " ".join(re.sub(r"^# ?", "", line) for line in path.read_text().splitlines() if line.startswith("#"))
    assert re.search(rf"take {parts['activations'] / 1e9:.0f} GB.*; "
                     rf"the total is {sum(parts.values()) / 1e9:.0f} of", said)


def test_the_network_policy_is_about_these_pods_and_their_ports():
    [policy] = documents(DEPLOY / "kuberay" / "network-policy.yaml")
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    ports = {p["port"] for rule in policy["spec"]["ingress"] for p in rule.get("ports", ())}
    for param in RAY_OBJECTS:
        [doc] = param.values
        assert doc["metadata"]["namespace"] == policy["metadata"]["namespace"]
        for group in groups_of(doc):
            assert wanted <= group["template"]["metadata"]["labels"].items()
        head = cluster_of(doc)["headGroupSpec"]
        assert ports <= {p["containerPort"] for p in head["template"]["spec"]["containers"][0]["ports"]}
        assert int(head["rayStartParams"]["metrics-export-port"]) in ports
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


# -- Slurm ---------------------------------------------------------------------------------------------------------
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_the_job_script_passes_shellcheck(script):
    done = subprocess.run([tool("shellcheck"), "--severity=style", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_outside_a_job_the_script_says_how_to_use_it(script):
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1
    assert "sbatch --nodes" in done.stderr


def test_ray_knows_the_options_of_the_job_script():
    text = (DEPLOY / "slurm" / "tokenmill.sbatch").read_text()
    body = text[text.index("\nray_node() {"):text.index("\n}\n", text.index("\nray_node() {"))]
    options = set(re.findall(r"--[a-z][a-z-]+", re.sub(r"#.*", "", body)))
    start = pytest.importorskip("ray.scripts.scripts").start
    known = {o for p in start.params for o in p.opts}
    assert {"--head", "--block", "--dashboard-host", "--metrics-export-port"} <= options <= known
    assert "--dashboard-host=127.0.0.1" in body
