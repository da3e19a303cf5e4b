"""Stand-ins for packages of text environments, in a folder for ``PYTHONPATH`` of the process that imports them."""

from pathlib import Path

SCIENCEWORLD = '''
"""Loads the tasks boil and melt with three variations. Each action 'good' scores 60, 'bad' -100; 'raise' raises."""
import os, time
class ScienceWorldEnv:
    made = 0
    def __init__(self, task, jar, envStepLimit=100):
        assert (task, jar) == ("", None), (task, jar)
        ScienceWorldEnv.made += 1
        self.number = ScienceWorldEnv.made
    def load(self, name, variation, simplification, generateGoldPath):
        assert generateGoldPath and simplification == "easy", simplification
        if name not in ("boil", "melt"):
            raise ValueError(f"Unknown taskName: {name!r}. ")
        self.loaded, self.score, self.steps = f"{name} {variation}", 0, 0
    def get_max_variations(self, name):
        return 3
    def reset(self):
        print("a line on the standard output")
        return f"environment {self.number}", {}
    def get_gold_action_sequence(self):
        return ["good", "good"]
    def get_task_description(self):
        return f"Your task is {self.loaded}."
    def step(self, action):
        if action == "raise":
            raise RuntimeError("the simulator is gone")
        while action == "hang" or action.startswith("await ") and not os.path.exists(action[6:]):
            time.sleep(0.01)
        self.steps += 1
        reward = {"good": 60, "bad": -100, "end": 40}.get(action, 0)
        self.score += reward
        return f"{self.steps}: {action}", reward, action == "end" or self.score < 0, {"score": self.score}
    def close(self):
        pass
'''
TEXTWORLD = '''
"""A game whose file holds the winning command and the maximum score."""
import sys, types
class EnvInfos:
    def __init__(self, **keys):
        self.keys = keys
games = []
class Game:
    def __init__(self, path, infos, wrappers):
        assert infos.keys["admissible_commands"] and infos.keys["description"] and infos.keys["inventory"], infos.keys
        self.wrappers = [type(one).__name__ for one in wrappers]
        self.command, self.most = open(path).read().split(";")
    def reset(self):
        self.steps = 0
        return f"-= Welcome =- {', '.join(self.wrappers)}", {"max_score": int(self.most) or None}
    def step(self, action):
        self.steps += 1
        won = action == self.command
        return ("You won." if won else "Nothing happens."), (int(self.most) or 1) if won else 0, won, {}
    def close(self):
        print("closed")
gym = types.ModuleType("textworld.gym")
gym.register_game = lambda path, infos, wrappers: games.append((path, infos, wrappers)) or str(len(games) - 1)
gym.make = lambda name: Game(*games[int(name)])
sys.modules["textworld.gym"] = gym
'''
ALFWORLD = """
class AlfredExpertType:
    HANDCODED = "handcoded"
class AlfredDemangler:
    pass
class AlfredExpert:
    def __init__(self, expert_type):
        assert expert_type == "handcoded"
"""
WEBSHOP = '''
"""Session 5 buys a red shoe. Each server counts its makers."""
class Server:
    def __init__(self):
        self.goals, self.user_sessions = [None] * 10, {}
class WebAgentTextEnv:
    def __init__(self, observation_mode, server, session_prefix, num_products, human_goals):
        assert observation_mode == "text_rich" and human_goals and num_products == 1000
        self.server, self.prefix = server or Server(), session_prefix
        self.first = server is None
    def reset(self, session):
        self.session, self.page = self.prefix + str(session), "search"
        self.server.user_sessions[self.session] = {}
    @property
    def observation(self):
        return f"page {self.page}, {len(self.server.user_sessions)} sessions"
    def get_available_actions(self):
        buttons = {"search": ["search"], "results": ["b01", "back to search"], "b01": ["buy now"]}
        return {"has_search_bar": self.page == "search", "clickables": buttons[self.page]}
    def step(self, action):
        if action.startswith("search["):
            self.page = "results"
        elif action.lower() == "click[buy now]":
            return "bought", 0.75, True, None
        else:
            self.page = action[6:-1].lower()
        return self.observation, 0, False, None
    def close(self):
        pass
'''
INTERCODE = '''
"""Task 3 asks for the number of rows."""
class SqlEnv:
    def __init__(self, image, data_path, preprocess, verbose):
        assert image == "docker-env-sql" and open(data_path).read() == "tasks"
        self.preprocess, self.result = preprocess, None
    def reset(self, number):
        self.record = {"extra": {"db": f"shop{number}"}}
        assert self.preprocess(self.record) == f"use shop{number}"
        self.query = "How many rows?"
        return "ready", {}
    def step(self, action):
        if action == "submit":
            return "", float(self.result == "SELECT COUNT(*) FROM t"), True, {"action_executed": True}
        self.result = action
        return [(7,)], 0.25, False, {"action_executed": True}
'''

ALFWORLD_GAME = '''
"""Makes a game of the real ALFWorld in a folder: a mug on a desk belongs on a shelf."""
import json, os, sys
import alfworld
from alfworld.agents.utils.misc import add_task_to_grammar
data = os.path.join(os.path.dirname(alfworld.__file__), "data")
place = "_bar__plus_0{0}_dot_50_bar__plus_00_dot_50_bar__plus_01_dot_00"
desk, shelf, mug = "Desk" + place.format(0), "Shelf" + place.format(1), "Mug" + place.format(2)
spots = [f"loc_bar_{n}_bar_{n}_bar_0_bar_0" for n in range(3)]
far = " ".join(f"(= (distance {a} {b}) 1)" for a in spots for b in spots)
problem = f"""
(define (problem mug) (:domain alfred)
(:objects agent1 - agent MugType - otype DeskType - rtype ShelfType - rtype {mug} - object {desk} - receptacle
 {shelf} - receptacle {' '.join(spots)} - location)
(:init (= (total-cost) 0) {far}
 (receptacleType {desk} DeskType) (receptacleType {shelf} ShelfType) (objectType {mug} MugType) (pickupable {mug})
 (canContain DeskType MugType) (canContain ShelfType MugType) (atLocation agent1 {spots[0]})
 (objectAtLocation {mug} {spots[1]}) (receptacleAtLocation {desk} {spots[1]}) (receptacleAtLocation {shelf} {spots[2]})
 (inReceptacle {mug} {desk}))
(:goal (and (exists (?r - receptacle) (exists (?o - object)
 (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r ShelfType)))))))
"""
targets = {"object_target": "Mug", "parent_target": "Shelf", "mrecep_target": "", "toggle_target": ""}
targets["object_sliced"] = False
task = {"task_type": "pick_and_place_simple", "pddl_params": targets, "turk_annotations": {"anns": []}, "scene": {}}
grammar = add_task_to_grammar(open(os.path.join(data, "alfred.twl2")).read(), task)
domain = open(os.path.join(data, "alfred.pddl")).read()
game = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem, "solvable": True, "walkthrough": []}
json.dump(game, open(os.path.join(sys.argv[1], "game.tw-pddl"), "w"))
json.dump(task, open(os.path.join(sys.argv[1], "traj_data.json"), "w"))
'''


def write_worlds(folder: Path) -> dict[str, str]:
    """Write the packages, and programs of the names that they need; return the environment variables that find them."""
    files = {
        "scienceworld.py": SCIENCEWORLD,
        "textworld/__init__.py": TEXTWORLD,
        "alfworld/__init__.py": "",
        "alfworld/agents/__init__.py": "",
        "alfworld/agents/environment/__init__.py": "",
        "alfworld/agents/environment/alfred_tw_env.py": ALFWORLD,
        "gym.py": "",
        "web_agent_site/__init__.py": "",
        "web_agent_site/envs.py": WEBSHOP,
        "intercode/__init__.py": "",
        "intercode/envs.py": INTERCODE,
        "bin/java": "#!/bin/sh\n",
        "bin/docker": "#!/bin/sh\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return {"PYTHONPATH": str(folder), "PATH": str(folder / "bin")}
