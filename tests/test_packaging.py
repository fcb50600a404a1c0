"""What a user gets from the wheel: every shipped file, usable away from the checkout."""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import tracedraft

ROOT = Path(tracedraft.__file__).parents[1]
SHIPPED = {
    "conf": ROOT / "conf",
    "conf/experiment": ROOT / "experiments",  # through a link
    "assets": ROOT / "tracedraft" / "assets",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs the checkout: this package is installed")
    for name in ("build", "hatchling"):
        pytest.importorskip(name, reason=f"{name} is not installed, and builds here are offline")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def files(folder: Path) -> set[str]:
    found = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_wheel_holds_every_shipped_file(wheel, name):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"tracedraft/{name}/{file}" for file in files(SHIPPED[name])}
    assert expected
    assert expected <= held


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {file for file in files(ROOT / "tracedraft") if file.endswith(".py")}
    assert {f"tracedraft/{file}" for file in modules} <= held
    plugin = {f"hydra_plugins/{file}" for file in files(ROOT / "hydra_plugins") if file.endswith(".py")}
    assert plugin
    assert plugin <= held
    info = f"tracedraft-{tracedraft.__version__}.dist-info/"
    assert [name for name in held if not name.startswith(("tracedraft/", "hydra_plugins/", info))] == []
    assert b"tracedraft = tracedraft.cli:main" in zipfile.ZipFile(wheel).read(info + "entry_points.txt")


def test_the_installed_wheel_works_away_from_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    code = """
        import sys
        from pathlib import Path
        import tracedraft.cli
        from hydra import compose, initialize_config_dir
        from tracedraft.config import PACKAGE, build_spec, shipped_dir

        site = Path(sys.argv[1])
        assert PACKAGE.is_relative_to(site), PACKAGE
        conf = shipped_dir("conf")
        assert conf.is_relative_to(site), conf
        names = [file.stem for file in sorted((conf / "experiment").glob("*.yaml"))]
        assert names
        with initialize_config_dir(str(conf), version_base="1.3"):
            for name in names:
                compose("config", [f"experiment={name}"])
            cfg = compose("config", ["target=tiny", "draft=tiny", "workload=sample_chat"])
        conversations, data = build_spec(cfg.workload, "workload").load()
        for group in ("target", "draft", "adapter", "decode"):
            build_spec(cfg[group], group)
        sys.argv = ["tracedraft", "run", "target=tiny", "draft=tiny", "wandb.mode=disabled",
                    "workload.limit=1", "decode.max_new_tokens=8", "hydra.run.dir=run"]
        tracedraft.cli.main()
        sys.argv = ["tracedraft", "run", "-m", *sys.argv[2:-1], "adapter=fixed,reset", "launcher.dry_run=true"]
        tracedraft.cli.main()
        print(len(conversations), data["source"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(site)],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "12 shipped"
    assert (elsewhere / "run" / "summary.json").is_file()
