"""NeMo Gym's own resources servers, several in one process: run by the Python that has nemo-gym, for `bridges.py`.

    PYTHON nemo_gym_servers.py PORT NAME…

Each server's class, configuration and application are the package's; only its start (Ray, a head server, a
configuration of the whole fleet) is left out. Prints one JSON line when it listens: for each name the paths of its rows
and of its recorded rollouts, or why it could not be made.
"""

import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from unittest.mock import MagicMock

import uvicorn
import yaml
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient
from starlette.applications import Starlette
from starlette.routing import Mount


def settings_of(folder: Path) -> dict:
    """The server's own settings, from the first configuration that has some."""
    for path in sorted((folder / "configs").glob("*.yaml")):
        for instance, kinds in (yaml.safe_load(path.read_text()) or {}).items():
            for settings in (kinds.get("resources_servers") or {}).values() if isinstance(kinds, dict) else ():
                return {"name": instance, **settings}
    return {"name": folder.name, "entrypoint": "app.py", "domain": "other"}


def make(name: str):
    """The server's application, and what lies beside it."""
    package = importlib.util.find_spec("resources_servers")
    folder = Path(next(iter(package.submodule_search_locations))) / name
    sys.path.insert(0, str(folder))  # as its own start does: some import what lies beside them
    module = importlib.import_module(f"resources_servers.{name}.app")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, SimpleResourcesServer) and value.__module__ == module.__name__
    ]
    server_class = found[-1]
    settings = {**settings_of(folder), "host": "127.0.0.1", "port": 1}
    config = server_class.model_fields["config"].annotation.model_validate(settings)
    client = MagicMock(spec=ServerClient)  # for calls to model servers: none of these makes any
    app = server_class(config=config, server_client=client).setup_webserver()
    return app, {"rows": str(folder / "data/example.jsonl"), "rollouts": str(folder / "data/example_rollouts.jsonl")}


def main(port: int, names: list[str]) -> None:
    mounted, told = [], {}
    for name in names:
        try:
            app, told[name] = make(name)
            mounted.append(Mount(f"/{name}", app))
        except Exception as error:
            traceback.print_exc()
            told[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    print(json.dumps(told), flush=True)
    uvicorn.run(Starlette(routes=mounted), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
