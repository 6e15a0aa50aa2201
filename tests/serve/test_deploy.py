"""deploy/: what its files name is there. They are not run here."""

import json
import re
from pathlib import Path

import pytest
import typer.main
import yaml

from kvkeep.cli import app
from kvkeep.engine.store import Store
from kvkeep.serve.metrics import FrontMetrics, Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE, GPU = (yaml.safe_load((DEPLOY / name).read_text()) for name in ("compose.yaml", "compose.gpu.yaml"))


def options():
    """Of `kvkeep serve`, with the variables that stand for some."""
    command = typer.main.get_command(app).commands["serve"]
    named = {name for each in command.params for name in each.opts}
    return named, {each.envvar for each in command.params if each.envvar} | {"KVKEEP_API_KEYS", "KVKEEP_HOME"}


def instructions():
    """Of the Dockerfile: a word, and the rest of its line."""
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    return [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]


def test_options_and_variables_are_those_of_the_command():
    named, variables = options()
    used = [*re.findall(r'"(--[\w-]+)"', DOCKERFILE.split("ENTRYPOINT")[1]), "--budget", "--memory"]
    for each in (COMPOSE, GPU):
        used += [word for word in each["services"]["kvkeep"]["command"] if word.startswith("--")]
    assert len(used) > 8 and set(used) <= named
    assert set(re.findall(r"KVKEEP_\w+", DOCKERFILE)) | COMPOSE["services"]["kvkeep"]["environment"].keys() <= variables


def test_the_image_is_of_a_wheel_with_the_extra_for_a_user_without_rights():
    words = [word for word, _ in instructions()]
    assert set(words) <= {
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
    }
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    assert copied and all((ROOT / name).exists() for names in copied for name in names)
    assert "[serve]" in DOCKERFILE and "/health" in DOCKERFILE and words.index("USER") < words.index("ENTRYPOINT")
    assert dict(instructions())["USER"] == "kvkeep"


def test_files_that_are_mounted_are_there_and_services_know_each_other():
    services = COMPOSE["services"]
    for service in services.values():
        sources = [volume.split(":")[0] for volume in service.get("volumes", ())]
        assert all((DEPLOY / name).exists() if name.startswith(".") else name in COMPOSE["volumes"] for name in sources)
    assert (DEPLOY / services["kvkeep"]["build"]["context"] / services["kvkeep"]["build"]["dockerfile"]).exists()
    assert GPU["services"].keys() <= services.keys()
    (scraped,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    name, port = scraped["static_configs"][0]["targets"][0].split(":")
    assert name in services and f"EXPOSE {port}" in DOCKERFILE
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"].split("//")[1].split(":")[0] in services
    assert all(panel["datasource"]["uid"] == source["uid"] for panel in dashboard()["panels"])


def dashboard():
    return json.loads((DEPLOY / "grafana/dashboards/kvkeep.json").read_text())


def shown():
    """What /metrics shows of one server, and of a front with two replicas."""
    one = Metrics([], Store(1))
    one.requests.labels("/", "200").inc()
    front = FrontMetrics()
    front.requests.labels("/", "200").inc()
    return one.page().decode() + front.page((number, one.page().decode()) for number in (0, 1)).decode()


@pytest.mark.parametrize("panel", dashboard()["panels"], ids=lambda panel: panel["title"])
def test_every_query_names_what_metrics_show(panel):
    samples = [line.split(" ")[0] for line in shown().splitlines() if not line.startswith("#")]
    names = {each.split("{")[0] for each in samples}
    labels = set(re.findall(r'(\w+)="', " ".join(samples)))
    for target in panel["targets"]:
        named = set(re.findall(r"kvkeep_\w+", target["expr"]))
        assert named and named <= names
        by = re.findall(r"by \(([\w, ]+)\)", target["expr"]) + re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert {label for each in by for label in each.split(", ")} <= labels


def test_pages_of_replicas_are_one_page_with_their_numbers():
    one, two = Metrics([], Store()), Metrics([], Store())
    one.answer_tokens.inc(3)
    two.answer_tokens.inc(4)
    two.first.observe(0.01)
    page = FrontMetrics().page([(1, two.page().decode()), (0, one.page().decode())]).decode()
    assert page.count("# TYPE kvkeep_answer_tokens_total counter") == 1
    assert (
        'kvkeep_answer_tokens_total{replica="0"} 3.0' in page and 'kvkeep_answer_tokens_total{replica="1"} 4.0' in page
    )
    assert 'kvkeep_first_token_seconds_count{replica="1"} 1.0' in page
    assert page.count("# TYPE kvkeep_first_token_seconds histogram") == 1
