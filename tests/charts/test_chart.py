"""The Helm chart: rendered and checked by Helm's own library, validated against the schemas of Kubernetes."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from pydantic import BaseModel

from tests.monitoring.exported import families
from tokenmill.settings.declarations import ALL, ApiSettings, WorkerSettings
from tokenmill.settings.setting import settings_of
from worker.batch_worker import SHUTDOWN_SECONDS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tokenmill"
KUBERNETES = ["1.27", "1.30", "1.37"]
PASSWORD = "p" * 16
CUSTOM: dict[str, type[BaseModel]] = {
    "ScaledObject": ScaledObject,
    "ServiceMonitor": ServiceMonitor,
    "PrometheusRule": PrometheusRule,
}
MINIMAL = {"redis": {"password": PASSWORD}}
FULL: dict[str, Any] = {
    "image": {"prefix": "registry.example/llm/", "tag": "1.2.3", "pullSecrets": [{"name": "pull"}]},
    "model": {"name": "org/model", "servedName": "model"},
    "settings": {"TOKENMILL_RETENTION_SECONDS": 10000000, "TOKENMILL_MAX_STREAMS": "64"},
    "secrets": {"apiKeys": "keys", "webhook": "hook", "huggingFace": "hub"},
    "api": {
        "replicas": 3,
        "nodeSelector": {"pool": "cpu"},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "tls"},
    },
    "workers": {
        "default": None,
        "a10": {
            "gpuResource": "nvidia.com/gpu",
            "replicas": 2,
            "settings": {"TOKENMILL_PREFIX_CACHING": False, "TOKENMILL_PREFILL_RESERVE": 0.25},
        },
        "h100": {
            "gpuResource": "nvidia.com/gpu",
            "graceSeconds": 120,
            "cacheClaim": "models",
            "runtimeClassName": "nvidia",
            "priorityClassName": "high",
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "autoscaling": {"enabled": True, "minReplicas": 0, "maxReplicas": 8},
        },
    },
    "redis": {"existingSecret": "redis-password", "storageClass": "fast"},
    "files": {"claim": "files"},
    "networkPolicy": {
        "allowEgress": False,
        "apiFrom": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
EXTERNAL_REDIS = {
    "files": {"url": "s3://bucket/files"},
    "redis": {"enabled": False, "external": {"urlSecret": "redis-url"}},
    "api": {"replicas": 1},
}
WITHOUT_POLICIES = {
    **MINIMAL,
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
}
VALUES = {
    "minimal": MINIMAL,
    "full": FULL,
    "external-redis": EXTERNAL_REDIS,
    "without-policies": WITHOUT_POLICIES,
}

each = pytest.mark.parametrize("name", VALUES)


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(str(CHART)) as loaded:
        yield loaded


def render(chart: helm_python.Chart, values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a release `demo` in the namespace `prod`."""
    chart.validate_schema(values)
    files = chart.render(values, name="demo", namespace="prod")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def only(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in objects if each["kind"] in {"Deployment", "StatefulSet"}]


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one.get("value") for one in container["env"]}


def selected(selector: dict[str, str], pod: dict[str, Any]) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()


def test_the_linter_finds_nothing() -> None:
    found = helm_python.lint(str(CHART), values=MINIMAL)
    assert [one for one in found["messages"] if "icon" not in one["error"]] == []


@each
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_follows_the_schema_of_its_kind(
    chart: helm_python.Chart, name: str, version: str
) -> None:
    for each in render(chart, VALUES[name]):
        model = CUSTOM.get(each["kind"])
        if model is None:
            kubernetes_validate.validate(each, version, strict=True)
        else:
            # A field that the model does not know would be missing.
            assert (
                model.model_validate(each).model_dump(mode="json", by_alias=True, exclude_unset=True) == each
            )


@each
def test_names_are_unique(chart: helm_python.Chart, name: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in render(chart, VALUES[name])]
    assert len(set(names)) == len(names)


@each
def test_selectors_find_exactly_their_pods(chart: helm_python.Chart, name: str) -> None:
    objects = render(chart, VALUES[name])
    all_pods = pods(objects)
    workloads = [each for each in objects if each["kind"] in {"Deployment", "StatefulSet"}]
    for each in workloads:
        selector = each["spec"]["selector"]["matchLabels"]
        assert [pod for pod in all_pods if selected(selector, pod)] == [each["spec"]["template"]]
    for each in objects:
        if each["kind"] == "Service":
            found = [pod for pod in all_pods if selected(each["spec"]["selector"], pod)]
            ports = {port["name"] for pod in found for port in pod["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in each["spec"]["ports"]} == ports
        if each["kind"] == "PodDisruptionBudget":
            assert any(selected(each["spec"]["selector"]["matchLabels"], pod) for pod in all_pods)


@each
def test_pods_have_no_unneeded_rights(chart: helm_python.Chart, name: str) -> None:
    for pod in pods(render(chart, VALUES[name])):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_environment_consists_of_settings_that_the_process_reads(chart: helm_python.Chart) -> None:
    own = {"REDIS_PASSWORD", "HF_TOKEN"}
    for pod in pods(render(chart, FULL)):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if component != "redis":
            read = settings_of(ApiSettings if component == "api" else WorkerSettings)
            assert set(environment(pod)) - own <= {one.variable for one in read.values()}


def test_numbers_are_written_as_the_settings_read_them(chart: helm_python.Chart) -> None:
    objects = render(chart, FULL)
    assert only(objects, "ConfigMap", "demo-tokenmill-settings")["data"] == {
        "TOKENMILL_RETENTION_SECONDS": "10000000",
        "TOKENMILL_MAX_STREAMS": "64",
    }
    worker = environment(only(objects, "Deployment", "demo-tokenmill-worker-a10")["spec"]["template"])
    assert worker["TOKENMILL_PREFIX_CACHING"] == "false"
    assert worker["TOKENMILL_PREFILL_RESERVE"] == "0.25"


def test_redis_keeps_every_accepted_task_and_starts_as_in_compose(chart: helm_python.Chart) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]
    spec = only(render(chart, MINIMAL), "StatefulSet", "demo-tokenmill-redis")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["image"] == compose["image"]
    start, expected = container["command"][-1], compose["command"][-1].replace("$$", "$")
    assert start.replace("--dir /data ", "") == expected
    assert {one["name"] for one in container["env"]} == set(compose["environment"])


@each
def test_no_object_but_the_secret_holds_the_password(chart: helm_python.Chart, name: str) -> None:
    for each in render(chart, VALUES[name]):
        assert each["kind"] == "Secret" or PASSWORD not in yaml.safe_dump(each)


def test_pods_are_killed_later_than_their_processes_need(chart: helm_python.Chart) -> None:
    for values in (MINIMAL, FULL):
        objects = render(chart, values)
        for pod in pods(objects):
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            if component == "worker":
                assert grace >= float(environment(pod)["TOKENMILL_GRACE_SECONDS"]) + SHUTDOWN_SECONDS + 10
            if component == "api":
                assert grace >= float(environment(pod)["TOKENMILL_HTTP_GRACE_SECONDS"]) + 10


def test_probes_ask_paths_that_the_processes_serve(chart: helm_python.Chart) -> None:
    served = {
        "api": set(re.findall(r'get\("(/\w+)"', (ROOT / "api/routes/health.py").read_text())),
        "worker": set(re.findall(r'path == "(/\w+)"', (ROOT / "monitoring/http.py").read_text())),
    }
    for pod in pods(render(chart, FULL)):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        (container,) = pod["spec"]["containers"]
        names = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if component in served:
                assert container[probe]["httpGet"]["path"] in served[component]
                assert container[probe]["httpGet"]["port"] in names
    worker = only(render(chart, FULL), "Deployment", "demo-tokenmill-worker-h100")["spec"]["template"]
    probe = worker["spec"]["containers"][0]["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    assert allowed > float(environment(worker)["TOKENMILL_LOAD_SECONDS"])


def test_a_kind_with_a_gpu_takes_one_and_never_falls_back_to_the_cpu(chart: helm_python.Chart) -> None:
    objects = render(chart, FULL)
    assert not [each for each in objects if each["metadata"]["name"] == "demo-tokenmill-worker-default"]
    for kind in ("a10", "h100"):
        pod = only(objects, "Deployment", f"demo-tokenmill-worker-{kind}")["spec"]["template"]
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert environment(pod)["TOKENMILL_DEVICE"] == "cuda"


def test_keda_scales_by_metrics_that_the_service_exports(chart: helm_python.Chart) -> None:
    objects = render(chart, FULL)
    scaled = only(objects, "ScaledObject", "demo-tokenmill-worker-h100")["spec"]
    deployment = only(objects, "Deployment", scaled["scaleTargetRef"]["name"])
    # KEDA owns the number: a value of the chart would reset it at each upgrade.
    assert "replicas" not in deployment["spec"]
    assert only(objects, "Deployment", "demo-tokenmill-worker-a10")["spec"]["replicas"] == 2
    exported = {family.name for family in families()}
    used = {re.search(r"tokenmill_\w+", one["metadata"]["query"])[0] for one in scaled["triggers"]}  # type: ignore[index]
    assert used == {"tokenmill_queue_waiting_tokens", "tokenmill_tasks_owned"}
    assert used <= exported
    assert [one["metadata"]["threshold"] for one in scaled["triggers"]] == ["20000", "256"]


def test_alerts_and_dashboard_are_those_of_the_monitoring_room(chart: helm_python.Chart) -> None:
    objects = render(chart, FULL)
    rules = yaml.safe_load((ROOT / "monitoring/prometheus/alerts.yml").read_text())
    assert only(objects, "PrometheusRule", "demo-tokenmill")["spec"] == rules
    dashboard = (ROOT / "monitoring/grafana/dashboards/tokenmill.json").read_text()
    assert only(objects, "ConfigMap", "demo-tokenmill-dashboard")["data"] == {"tokenmill.json": dashboard}
    jobs = {
        relabeling["replacement"]
        for each in objects
        if each["kind"] == "ServiceMonitor"
        for relabeling in each["spec"]["endpoints"][0]["relabelings"]
    }
    scraped = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert jobs == {one["job_name"] for one in scraped} - {"prometheus"}


@pytest.mark.parametrize(
    ("files", "url", "volume"),
    [
        ({}, "/files", {"name": "files", "emptyDir": {}}),
        ({"claim": "c"}, "/files", {"name": "files", "persistentVolumeClaim": {"claimName": "c"}}),
        ({"url": "s3://bucket/files"}, "s3://bucket/files", None),
    ],
)
def test_files_are_kept_where_the_values_say(
    chart: helm_python.Chart, files: dict[str, str], url: str, volume: dict[str, Any] | None
) -> None:
    pod = only(render(chart, {**MINIMAL, "files": files}), "Deployment", "demo-tokenmill-api")["spec"][
        "template"
    ]
    assert environment(pod)["TOKENMILL_FILES_URL"] == url
    volumes = [one for one in pod["spec"]["volumes"] if one["name"] == "files"]
    assert volumes == ([volume] if volume else [])
    mounts = {one["name"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
    assert ("files" in mounts) == bool(volume)


def test_only_the_release_reaches_redis(chart: helm_python.Chart) -> None:
    objects = render(chart, FULL)
    policy = only(objects, "NetworkPolicy", "demo-tokenmill-redis")["spec"]
    ((rule,)) = policy["ingress"]
    (peer,) = rule["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    allowed = [
        pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for pod in pods(objects)
        if selected(peer["podSelector"]["matchLabels"], pod)
        and pod["metadata"]["labels"][expression["key"]] in expression["values"]
    ]
    assert sorted(allowed) == ["api", "worker", "worker"]
    assert policy["egress"] == []
    for component in ("api", "worker"):
        egress = only(objects, "NetworkPolicy", f"demo-tokenmill-{component}")["spec"]["egress"]
        assert {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]} in egress
        assert any(rule["ports"] == [{"port": "redis", "protocol": "TCP"}] for rule in egress)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "set redis.password"),
        ({"redis": {"enabled": False}}, "redis.external.urlSecret"),
        ({"redis": {"password": "short"}}, "password"),
        ({**MINIMAL, "worker": {}}, "worker"),
        ({**MINIMAL, "workers": {"Upper": {}}}, "Upper"),
        ({**MINIMAL, "workers": {"a": {"gpu": 1}}}, "gpu"),
        ({**MINIMAL, "settings": {"TOKENMILL_API_KEYS": "secret"}}, "TOKENMILL_API_KEYS"),
        ({**MINIMAL, "settings": {"MAX_STREAMS": 1}}, "MAX_STREAMS"),
        ({**MINIMAL, "api": {"replicas": 0}}, "replicas"),
        ({**MINIMAL, "files": {"url": "s3://a/b", "claim": "c"}}, "files.url or files.claim"),
        ({**MINIMAL, "files": {"url": "bucket"}}, "url"),
    ],
)
def test_bad_values_are_refused_by_name(
    chart: helm_python.Chart, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(expected)):
        render(chart, values)


def test_the_schema_refuses_exactly_the_settings_that_the_chart_sets(chart: helm_python.Chart) -> None:
    """A setting that has a value of its own, or is a secret, is not taken from `settings`."""
    secrets = {one.variable for one in ALL.values() if one.is_secret}
    fixed = {
        name
        for pod in pods(render(chart, FULL))
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "redis"
        for name in environment(pod)
        if name.startswith("TOKENMILL_") and name not in FULL["workers"]["a10"]["settings"]
    } - {"TOKENMILL_DEVICE"}
    for variable in sorted((secrets | fixed) - {"REDIS_URL"}):
        with pytest.raises(helm_python.HelmError, match=variable):
            render(chart, {**MINIMAL, "settings": {variable: "x"}})
    for variable in sorted({one.variable for one in settings_of(WorkerSettings).values()} - secrets - fixed):
        if variable not in {"REDIS_URL", "TOKENMILL_CACHE_DIR"}:
            render(chart, {**MINIMAL, "settings": {variable: "x"}})


def test_a_package_contains_the_linked_files(tmp_path: Path) -> None:
    helm_python.package(str(CHART), destination=str(tmp_path))
    (archive,) = tmp_path.glob("*.tgz")
    listed = subprocess.run(["tar", "tf", archive], capture_output=True, text=True, check=True).stdout.split()
    assert {"tokenmill/files/alerts.yml", "tokenmill/files/dashboard.json"} <= set(listed)


def test_the_chart_and_the_project_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    assert chart["appVersion"] == chart["version"] == version[1]
