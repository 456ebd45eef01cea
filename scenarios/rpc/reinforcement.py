"""Teaches: an agent and its observers on other workers, who call it back while it waits for them (REINFORCE)."""

import os

import torch
import torch.distributed.rpc as rpc

STEPS = 8


class Observer:
    """Stands on a line; the reward is 1 for each step to the right."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent: rpc.RRef, episode: int) -> None:
        place = torch.zeros(1)
        for step in range(STEPS):
            action = agent.rpc_sync().select_action(self.id, place, episode * STEPS + step)
            place = place + (0.1 if action else -0.1)
            agent.rpc_sync().report_reward(self.id, float(action))


class Agent:
    def __init__(self, num_observers: int) -> None:
        torch.manual_seed(3)
        self.policy = torch.nn.Linear(1, 2)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.2)
        self.me = rpc.RRef(self)
        self.observers = [rpc.remote(f"observer{i}", Observer) for i in range(1, num_observers + 1)]
        self.rewards: dict[int, list[float]] = {i: [] for i in range(1, num_observers + 1)}
        self.log_probs: dict[int, list[torch.Tensor]] = {i: [] for i in range(1, num_observers + 1)}

    def select_action(self, observer: int, state: torch.Tensor, number: int) -> int:
        chances = torch.softmax(self.policy(state), dim=0)
        drawn = torch.rand((), generator=torch.Generator().manual_seed(1_000 * observer + number))
        action = int(drawn < chances[1])
        self.log_probs[observer].append(torch.log(chances[action]))
        return action

    def report_reward(self, observer: int, reward: float) -> None:
        self.rewards[observer].append(reward)

    def run_episode(self, episode: int) -> float:
        torch.futures.wait_all([o.rpc_async().run_episode(self.me, episode) for o in self.observers])
        total = sum(sum(rewards) for rewards in self.rewards.values())
        loss = torch.zeros(())
        for observer in self.rewards:
            for log_prob, reward in zip(self.log_probs[observer], self.rewards[observer], strict=False):
                loss = loss - log_prob * (reward - 0.5)
            self.rewards[observer], self.log_probs[observer] = [], []
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return total


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=size)
if rank == 0:
    agent = Agent(size - 1)
    for episode in range(4):
        print(f"episode {episode}: reward {agent.run_episode(episode):.0f} of {STEPS * (size - 1)}")
rpc.shutdown()
