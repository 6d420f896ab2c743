"""NeMo Gym's own SimpleAgent on one row, over a resources server and a model server given by URL: for `bridges.py`.

    PYTHON nemo_gym_agent.py RESOURCES_URL MODEL_URL KEY < ROW

Agent class, application and HTTP helpers are the package's; only where servers are found is given instead of asked of a
head server. Prints the answer of /run as one JSON line.
"""

import asyncio
import json
import socket
import sys
from unittest.mock import MagicMock

import aiohttp
import uvicorn
from nemo_gym.server_utils import ServerClient
from pydantic import BaseModel
from responses_api_agents.simple_agent.app import SimpleAgent


def plain(body):
    return body.model_dump(exclude_unset=True) if isinstance(body, BaseModel) else body


async def main(resources: str, model: str, key: str) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    own = f"http://127.0.0.1:{listening.getsockname()[1]}"
    urls = {"ours": resources, "policy_model": model, "agent": own}
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:

        async def post(server_name, url_path, json=None, cookies=None, **_):
            headers = {"authorization": f"Bearer {key}"} if server_name == "policy_model" else None
            given = {name: getattr(value, "value", value) for name, value in (cookies or {}).items()}
            return await http.post(urls[server_name] + url_path, json=plain(json), cookies=given, headers=headers)

        client = MagicMock(spec=ServerClient)
        client.post = post
        settings = {
            "name": "agent",
            "host": "127.0.0.1",
            "port": 1,
            "entrypoint": "app.py",
            "resources_server": {"type": "resources_servers", "name": "ours"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
            "max_steps": 6,
        }
        agent = SimpleAgent(
            config=SimpleAgent.model_fields["config"].annotation.model_validate(settings), server_client=client
        )
        server = uvicorn.Server(uvicorn.Config(agent.setup_webserver(), log_level="error"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        answer = await http.post(f"{own}/run", json=json.load(sys.stdin))
        print(json.dumps({"status": answer.status, "body": await answer.json(content_type=None)}), flush=True)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
