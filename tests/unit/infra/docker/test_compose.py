"""The servers of a team: loopback, no credential in a file, and one name for one thing."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.services.stack import MLFLOW_PORT, PREFECT_PORT

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "infra" / "docker" / "compose.yaml").read_text("utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OPERATE = (ROOT / "docs" / "guides" / "operate.md").read_text("utf-8")
ONCE = {"bucket", "automations"}
"""Services that end when they have done their work."""
CREDENTIALS = {
    "POSTGRES_PASSWORD",
    "PREFECT_API_AUTH_STRING",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}


def test_credentials_come_only_from_environment_without_default() -> None:
    assert set(re.findall(r"\$\{(\w+):\?", TEXT)) == CREDENTIALS
    assert not re.findall(rf"\$\{{?(?:{'|'.join(CREDENTIALS)})(?:\}}|:-)", TEXT)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|AUTH|KEY", name):
                assert re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), name


def test_ports_bind_to_loopback_and_match_rlhf_up() -> None:
    published = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert published == {
        name: [f"${{RLHF_BIND:-127.0.0.1}}:{port}:{port}"]
        for name, port in (("s3", 9000), ("prefect", PREFECT_PORT), ("mlflow", MLFLOW_PORT))
    }
    for name in ("prefect", "mlflow"):
        command = SERVICES[name]["command"]
        assert command[command.index("--port") + 1] == published[name][0].rsplit(":", 1)[1]


@pytest.mark.parametrize("name", SERVICES)
def test_service_waits_for_its_dependencies_and_reports_health(name: str) -> None:
    service = SERVICES[name]
    assert ("healthcheck" in service) == (name not in ONCE)
    assert service["restart"] == ("no" if name in ONCE else "unless-stopped")
    waits_for = service.get("depends_on", {})
    for other, how in waits_for.items():
        ended = "service_completed_successfully" if other in ONCE else "service_healthy"
        assert how == {"condition": ended}
    values = [*map(str, service.get("environment", {}).values())]
    hosts = {host for each in values for host in re.findall(r"(?://|@)(\w+):\d+", each)}
    reached = {
        *waits_for,
        *(far for other in waits_for for far in SERVICES[other].get("depends_on", {})),
    }
    assert hosts - {"127"} <= reached, "it talks to what it does not wait for"


def test_images_are_pinned_and_the_two_databases_are_made() -> None:
    for name, service in SERVICES.items():
        assert re.fullmatch(
            r"\$\{RLHF_IMAGE:-rlhf-pipeline\}|[\w./-]+:(?!latest)[\w.-]+", service["image"]
        ), name
    made = re.findall(r"CREATE DATABASE (\w+);", (ROOT / "infra/docker/databases.sql").read_text())
    assert set(re.findall(r"@postgres:5432/(\w+)", TEXT)) == set(made)


def test_the_guide_names_every_variable_and_no_other_port() -> None:
    [section] = re.findall(r"^## A server for a team\n(.*?)^## ", OPERATE, re.M | re.S)
    for variable in set(re.findall(r"\$\{(\w+)", TEXT)):
        assert f"`{variable}`" in section, variable
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert port.rsplit(":", 1)[1] in section
