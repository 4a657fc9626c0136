"""Report this machine's devices as one line of JSON, for a parent that must not import torch.

    python -m hardware.survey NAME     the platform of `NAME` (or `auto`) and its product name
    python -m hardware.survey          the same for `auto`, its devices, and every external plugin

Promises: a plugin that does not load is reported and affects nothing else.
"""

import sys

from hardware import nvidia_smi
from hardware.detection import availability, create, detect, has_kernel_compiler
from infra.errors import ConfigError
from infra.plugins import load_row, outside_rows, reason_of
from infra.survey_report import FoundPlatform, FoundPlugin, Refusal, SurveyReport


def main() -> None:
    """Print the report that the command line requests."""
    wanted = sys.argv[1:]
    try:
        report = find_platform(*wanted) if wanted else survey()
    except ConfigError as error:
        report = SurveyReport(refusal=Refusal(path=error.path, problem=error.problem))
    sys.stdout.write(f"\n{report.model_dump_json()}\n")


def find_platform(requested: str, *, with_facts: bool = False) -> SurveyReport:
    """Report the platform that a job would choose here and its device, or why there is none.

    `with_facts` opens all devices.
    """
    try:
        platform, reason = detect(requested)
    except ConfigError as error:
        return SurveyReport(refusal=Refusal(path=error.path, problem=error.problem))
    try:
        label, memory_bytes = platform.device_label(), platform.total_memory_bytes()
        supports_fp8 = platform.supports_fp8()
        facts = platform.device_facts() if with_facts else None
    except Exception as error:  # noqa: BLE001  driver boundary: any reason is the answer
        problem = f"{reason}; the device does not open: {reason_of(error)}"
        return SurveyReport(refusal=Refusal(path="hardware.platform", problem=problem))
    return SurveyReport(
        platform=FoundPlatform(
            name=platform.name,
            device=platform.device_name,
            reason=reason,
            label=label,
            num_devices=platform.device_count(),
            memory_bytes=memory_bytes,
            has_compiler=has_kernel_compiler(),
            supports_fp8=supports_fp8,
        ),
        devices=facts,
    )


def survey() -> SurveyReport:
    """Report the platform of this machine, and the result of loading every plugin."""
    plugins: list[FoundPlugin] = []
    for kind, row in outside_rows():
        name, detail, problem = f"{kind}.{row.name}", f"{row.owner}, {row.target}", None
        try:
            load_row(row, f"plugin {name}")
            if kind == "platform":
                create(row.name)
                found = availability(row.name)
                detail += f", {'available' if found.ok else 'not available'}: {found.reason}"
        except ConfigError as error:
            problem = error.problem
        plugins.append(FoundPlugin(name=name, detail=detail, problem=problem))
    more = {"plugins": tuple(plugins), "nvidia_driver": nvidia_smi.driver_version()}
    return find_platform("auto", with_facts=True).model_copy(update=more)


if __name__ == "__main__":
    main()
