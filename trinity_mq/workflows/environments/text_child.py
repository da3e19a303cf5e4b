"""Text environments of other projects, run for :mod:`trinity_mq.workflows.environments.children` in another Python.

This module imports nothing from trinity_mq, because that Python may not have it, and it runs on Python 3.8 and later.
A line of JSON on the standard input is a request: ``open`` makes an environment under a key, ``step`` executes an
action in it, ``close`` ends it. A line on the standard output answers it. Requests are answered one after another.
Prints of the environments go to the standard error.
"""

from __future__ import annotations

import os
import sys

if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:  # modules in this folder must not shadow its imports
    del sys.path[0]

import argparse
import importlib.util
import json
import queue
import shutil
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    State = dict[str, Any]  # ``observation``, and after a step ``reward`` and ``done``; other keys are facts

NO_JAVA = (
    "there is no program 'java', in which ScienceWorld runs; install Debian's default-jre-headless, or a JRE of 8+"
)


class WrongRecordError(Exception):
    """The record is wrong. A new attempt fails too."""


class TextEnvironment:
    """One kind of environment."""

    packages: tuple[str, ...] = ()
    """Modules that must be importable, with the command that installs them after a colon."""

    def missing(self) -> list[str]:
        """Return a sentence for each thing that this Python lacks."""
        pairs = [entry.partition(":")[::2] for entry in self.packages]
        return [
            f"module {module} is not installed in {sys.executable}: {command}"
            for module, command in pairs
            if importlib.util.find_spec(module) is None
        ]

    def open(self, args: dict[str, Any]) -> tuple[Any, State]:
        """Return a new environment and its first state.

        Raises:
            WrongRecordError: The record describes no environment.
        """
        raise NotImplementedError

    def step(self, env: Any, action: str) -> State:
        """Execute an action; return the state after it."""
        raise NotImplementedError

    def close(self, env: Any) -> None:
        """End an environment."""
        env.close()


class ScienceWorld(TextEnvironment):
    """ScienceWorld. Its Java process is kept and loads the next task."""

    packages = ("scienceworld:pip install scienceworld",)

    def __init__(self) -> None:
        self._idle: Any = None
        self._is_broken = False

    def missing(self) -> list[str]:
        return super().missing() + ([] if shutil.which("java") else [NO_JAVA])

    def open(self, args: dict[str, Any]) -> tuple[Any, State]:
        from scienceworld import ScienceWorldEnv

        env = ScienceWorldEnv("", None) if self._idle is None else self._idle
        self._idle, self._is_broken = None, False
        env.envStepLimit = args["step_limit"]
        name, variation = args["task_name"], args["variation"]
        try:
            env.load(name, variation, args["simplification"], generateGoldPath=True)
            count = int(env.get_max_variations(name))
            if not 0 <= variation < count:
                raise ValueError(f"variation {variation} of task {name!r} does not exist; it has {count}")
            observation, _ = env.reset()
            golden = len(env.get_gold_action_sequence())
        except ValueError as error:
            self._idle = env
            raise WrongRecordError(f"ScienceWorld cannot load this task: {error}") from error
        except Exception:
            env.close()
            raise
        facts = {"task": str(env.get_task_description()), "golden_rounds": golden}
        return env, {"observation": str(observation), **facts}

    def step(self, env: Any, action: str) -> State:
        try:
            observation, reward, done, _ = env.step(action)
        except Exception:
            self._is_broken = True
            raise
        return {"observation": str(observation), "reward": float(reward), "done": bool(done)}

    def close(self, env: Any) -> None:
        if self._is_broken:
            env.close()
        else:
            self._idle = env


class TextWorld(TextEnvironment):
    """Games of TextWorld, in the formats that it reads."""

    packages: tuple[str, ...] = ("textworld:pip install textworld",)

    def wrappers(self) -> list[Any]:
        """Return the wrappers that TextWorld puts around the environment of a game. Default: none."""
        return []

    def open(self, args: dict[str, Any]) -> tuple[Any, State]:
        import textworld
        import textworld.gym

        game = allowed_file(args["games"], args["game"])
        infos = textworld.EnvInfos(description=True, inventory=True, admissible_commands=True, max_score=True)
        name = textworld.gym.register_game(game, infos, wrappers=self.wrappers())
        env = textworld.gym.make(name)
        observation, facts = env.reset()
        most = facts.get("max_score")
        return env, {"observation": str(observation), "max_score": None if most is None else float(most)}

    def step(self, env: Any, action: str) -> State:
        observation, score, done, _ = env.step(action)
        return {"observation": str(observation), "reward": float(score), "done": bool(done)}


def allowed_file(folder: str, name: str) -> str:
    """Return the path of a game. A game is a program, so a record may choose only among the files of a folder.

    Raises:
        WrongRecordError: The folder has no such file.
    """
    allowed = os.path.realpath(folder)
    try:
        game = os.path.realpath(os.path.join(allowed, name))
    except ValueError as error:  # no file has such a name
        raise WrongRecordError(f"the record names the game {name!r:.300}: {error}") from error
    if os.path.commonpath([allowed, game]) != allowed:
        raise WrongRecordError(
            f"the game {name!r:.300} is not in the folder {folder!r}, and a record chooses no other file: correct the "
            "record, or name the folder of the games in workflow_args.games"
        )
    if not os.path.isfile(game):
        raise WrongRecordError(f"there is no game {name!r:.300} in {folder!r}; put it there, or correct the record")
    return game


class AlfWorld(TextWorld):
    """Games of ALFWorld: games of TextWorld whose objects have readable names."""

    packages = (*TextWorld.packages, "alfworld:pip install alfworld")

    def wrappers(self) -> list[Any]:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert, AlfredExpertType

        return [AlfredDemangler(), AlfredExpert(expert_type=AlfredExpertType.HANDCODED)]


class WebShop(TextEnvironment):
    """WebShop. Its products and its search engine are loaded once for all environments."""

    packages = (
        "gym:pip install gym==0.24.0",
        "web_agent_site:clone github.com/princeton-nlp/WebShop, run its setup.sh, which fetches the products that are "
        "in no package, and set workflow_args.env.PYTHONPATH to that folder",
    )

    def __init__(self) -> None:
        self._server: Any = None
        self._made = 0

    def open(self, args: dict[str, Any]) -> tuple[Any, State]:
        from web_agent_site.envs import WebAgentTextEnv

        self._made += 1
        env = WebAgentTextEnv(
            observation_mode="text_rich",
            server=self._server,
            session_prefix=f"run{self._made}x",  # runs of one task share the server, not the session
            num_products=args["num_products"],
            human_goals=True,
        )
        self._server = env.server
        goals = len(self._server.goals)
        if not 0 <= args["session"] < goals:
            raise WrongRecordError(f"session {args['session']} does not exist: this WebShop has {goals} goals")
        env.reset(session=args["session"])
        return env, {"observation": str(env.observation), **self._actions(env)}

    def step(self, env: Any, action: str) -> State:
        observation, reward, done, _ = env.step(action)
        state = {"observation": str(observation), "reward": float(reward), "done": bool(done)}
        return state if done else {**state, **self._actions(env)}

    def close(self, env: Any) -> None:
        self._server.user_sessions.pop(env.session, None)
        env.close()

    def _actions(self, env: Any) -> dict[str, Any]:
        actions = env.get_available_actions()
        return {
            "search_bar": bool(actions["has_search_bar"]),
            "clickables": [str(name) for name in actions["clickables"]],
        }


class InterCodeSql(TextEnvironment):
    """InterCode's SQL environment: a database server in Docker."""

    packages = ("intercode:pip install intercode-bench",)

    def missing(self) -> list[str]:
        docker = [] if shutil.which("docker") else ["there is no program 'docker', in which InterCode's database runs"]
        return super().missing() + docker

    def open(self, args: dict[str, Any]) -> tuple[Any, State]:
        from intercode.envs import SqlEnv

        if not os.path.isfile(args["data_path"]):
            raise WrongRecordError(
                f"there is no file {args['data_path']!r:.300} of InterCode's tasks; correct data_path"
            )

        def database(record: dict[str, Any]) -> str:
            extra = record.get("extra")
            return str(record.get("db") or (extra.get("db") if isinstance(extra, dict) else "") or "")

        env = SqlEnv(
            args["image_name"],
            data_path=args["data_path"],
            preprocess=lambda record: f"use {database(record)}",
            verbose=False,
        )
        observation, _ = env.reset(args["query_idx"])
        record = getattr(env, "record", None)
        fields = record if isinstance(record, dict) else {}
        facts = {"query": str(getattr(env, "query", "")), "db": database(fields)}
        return env, {"observation": str(observation), **facts}

    def step(self, env: Any, action: str) -> State:
        observation, reward, done, info = env.step(action)
        executed = bool((info or {}).get("action_executed"))
        return {"observation": str(observation), "reward": float(reward), "done": bool(done), "executed": executed}

    def close(self, env: Any) -> None:
        for handle in (getattr(env, name, None) for name in ("cur", "cnx")):
            if handle is not None:
                handle.close()


WORLDS = {
    "scienceworld": ScienceWorld,
    "textworld": TextWorld,
    "alfworld": AlfWorld,
    "webshop": WebShop,
    "intercode_sql": InterCodeSql,
}


def answer_to(request: dict[str, Any], world: TextEnvironment, envs: dict[str, Any]) -> State:
    """Return the answer to a request. Errors are answers too.

    Args:
        request: The request.
        world: The kind of environment.
        envs: The open environments by their keys. Requests add and remove environments.
    """
    key = request["key"]
    try:
        if request["do"] == "step":
            if key in envs:
                return world.step(envs[key], request["action"])
            return {"error": "the environment of this run has ended with its process", "kind": "environment"}
        if key in envs:
            world.close(envs.pop(key))
        if request["do"] == "close":
            return {}
        envs[key], first = world.open(request["args"])
        return first
    except WrongRecordError as error:
        return {"error": str(error)[:4000], "kind": "task"}
    except Exception as error:  # an environment may raise any error
        return {"error": f"{type(error).__name__}: {error}"[:1000], "kind": "environment"}


def read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    """Put the lines of the standard input into a queue. When the input ends, end the process, also during a step that
    hangs: the runner may have been killed.
    """
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def main() -> None:
    """Answer requests until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("world", choices=sorted(WORLDS))
    parser.add_argument("--check", action="store_true", help="print what is missing here, and end")
    options = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints must not mix with answers
    world = WORLDS[options.world]()
    missing = world.missing()
    if options.check:
        out.write(json.dumps(missing) + "\n")
        out.flush()
        return
    if missing:
        sys.exit("; ".join(missing))
    envs: dict[str, Any] = {}
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        out.write(json.dumps({"id": request["id"], **answer_to(request, world, envs)}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
