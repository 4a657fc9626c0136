"""The size of the project, which only a decision may raise."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
MAX_STATEMENTS = 36_223
"""Of all floors together; docstrings do not count. 16,317 were 110 % of the 14,834 of commit
2867af7; 1,233 more came with rollout engines in processes of their own: the service before them,
shared memory, and vLLM; 900 with what such processes need: replacing one that is lost, routing,
a probe after each sync, requests that continue a sample, stops and forms of answers; 300 with
groups that span nodes and have their places reserved at once; 400 with weights by broadcast,
which replicas on other nodes need; 600 with SGLang, a server of its own; 150 with OpenAI's API
before any engine; 100 with environments of replicas, which are compared with those of the plan,
and rollout engines in `rlhf engines`; 100 with engines that sleep on the ranks' devices; 200
with adapters that are sent alone and engines whose workers share a model; 900 with ten advantage
estimators and eleven policy losses, each a function and a row, and the columns that they read;
200 with models as roles: a critic, its loss and its files, and updates that are left out by
name; 10 with what a recipe has to reach; 440 with rewards: the rules by which three data sets
find an answer, format and length, functions that see the whole sample, mixtures, servers, and a
cache; 390 with models that judge, in rounds and evaluations: a reward model, and a language
model; 150 with preference pairs in the forms that people publish; 40 with taking away what a
stage wrote on its way, once it is committed; 20 with refusals of verdicts that none gave; 10
with answers drawn again among those to their own prompt; 430 with what nobody needs any more of
a store: which run uses which stage, what may go, and taking it away while others work there; 20
with ranks that outlive a rollout engine that is lost while it takes their weights; 290 with
ranks that each broadcast their own parts of the weights: the plan of who sends what, and putting
them together; 190 with a champion that a model has to beat, on the same problems; 140 with runs
that start from a stage, and a plan that tells what is likely and what differs; 130 with runs
that are picked up after their process was killed; 60 with manifests of which every byte counts;
990 with a store in a bucket: its objects and their faults, the log, artifacts, copies, beats,
journals and checkpoints; 600 with nights: what they read, how they judge, their page; 590 with
samples of steps, the page that shows them, and two mirrors of a tracker; 30 with targets of
plugins that a plan looks for; 390 with what ails a run: rules, evidence, thresholds, their page;
210 with causes of failures in words and the stacks of every rank; 110 with rounds that are
judged before their policy is taken; 200 with files between a driver and processes that have
another disk; 210 with data sets, models and traces that a tracker shows; 125 with runs that a
deployment does for a command; 105 with places and devices that are refused, and who holds which
stage; 235 with collecting garbage in a bucket: what lies there, and runs that wait while
something goes; 80 with rejections told when they fall, what a number was before, and room and
deployments that are asked for where they count; 80 with data sets in tables of text; 90 with
conversations in the layouts that people publish, and what tools returned in them; 70 with
layouts that are recognised by what rows hold; 40 with OpenR1-Math and packed files; 44 with
conversations as JSON text in tables, wrong quotes told from bad rows, and tables that are passed
over; 30 with memory that is too little for a model, and parts that a checkpoint lacks; 240 with
losses over preferences and of a reward model; 200 with distillation: the log-probabilities of K
tokens without logits, and its losses; 330 with what k samples are worth, texts that training and
evaluation share, and orders by weight and by difficulty; 80 with what a loss may ask of the
heads of all backends: the log-probabilities of a teacher's tokens, and its likeliest; 450 with
preferences and a reward model as stages: sections, training sets, jobs, recipes, and a model as
transformers writes one; 250 with leaks that are looked for, orders that a section asks for, and
UltraFeedback; 120 with votes among the answers that rewards read; 350 with a teacher in the rounds
of RL, models that a recipe names by their alias, means of models, and declarations of stages in
files of their own, each with its imports; 30 with architectures that both engines would compute
wrongly, which are refused by name; 260 with data sets larger than memory: their rows on disk,
samples of them in another order, row groups, and conversations that lie packed; 450 with suites,
models that are compared, answers that are kept, and `rlhf evaluate`; 10 with answers that are kept
to be imitated; 130 with moving averages of weights: beside the optimizer of every backend, in
checkpoints, and committed; 195 with pairs of a policy's own answers: a stage that serves it, and
iterations; 400 with tasks of another harness: a model as it asks one, what it found by document,
and comparisons of that; 420 with teachers in engines of their own: logprobs of given tokens by
three engines, a service that asks its replicas for them, and models beside the policy's; 140 with
rows that stay in files, packed ids, and orders that look at no row; 75 with models that the plan
refuses because no engine computes their attention; 20 with waits that end, and say what they waited
for; 65 with the looks before a run, and the configurations of a recipe's stages, in files of their
own, each with its imports; 45 with long functions cut into parts that have a name; 240 with tools:
what may be called, calls and what they returned, in the layouts that people publish; 495 with
images of prompts: in the data set by their digests, as a model's processor cuts them, in the
embedded engine and the rounds of RL, and the plan's word on who sees them; 50 with judges and
teachers that are told of such prompts as text, and models that are compared; 15 with ports that
nobody else is given; 85 with curves of reward models, preferences and distillation in a report; 50
with rows that self-play reads from files, those that no pair can be made of, and images, rows and
prompts that do not fit, each named by its row; 35 with prompts of pairs that a model judges, what a
reward model reads, and the likelihood of chosen answers; 33 with the names of ports in forked
children and where a sandbox allows none, equal answers that are kept once, and models of values
that the plan looks at; 55 with families on vLLM and SGLang: experts and latent attention on a CPU,
what stays in float32, windows that would be passed over, and ends that nobody asked for; 57 with
images that samples share, in memory, on their way and in the vision tower, the forms in which
templates take calls, and data sets that lost their images; 73 with prompts whose images count
before anything samples: the tokens of an image by its size, without torch; 16 with what several
ranks are sent, which is held once; 54 with units that no micro-batch holds, margins that nobody
gave and settings that no loss reads; 50 with pairs and prompts of self-play that are too long,
which are left out and counted, and pairs that go to the disk as they are made; 122 with metrics of
which less is better, problems that rows repeat, and settings of an evaluation that nothing reads;
186 with runs that a tracker cannot take, which keep no others back, uploads that are waited for
while they move, and a store that is away for minutes; 117 with checkpoints of an owner who lost
his stage, and what a reward file imports; 124 with what runs at work need of a store, models that
they read by path, and a look at a bucket that holds nobody up; 89 with rewards that keep a client,
answers too large to compare, and ratings as people write them; 98 with components that a recipe
names, critics that warm up by their own steps, and a limit of what is cut at a deadline; 106 with
sources that are read as they were planned, splits however they are named, and cells and pages that
cannot be read; 128 with copies that are one trial, angles within a context, engines that are idle
before they take weights, quantized and unknown weights that are refused, and places found as views;
50 with rules that have no ground truth to compare with, tools that stand in a text alone, and what
to write where a column, a source or a CPU is missing; 164 with a database of MLflow that is made
beside its place, and one that cannot be migrated, which is told from one of other programs; 152
with answers as arrays, and trajectories of segments, which are trained on or not; 169 with the
parts of a round's step in modules of a page, each with its imports, and a loop's state as one
value; 249 with samples that are scored while others are generated, by processes that start when
they are worth it; 207 with tensors that are put once for all ranks and read from there, and where a
selection was made; 31 with tokens that a driver holds once; 21 with steps of short answers.
What is added is paid for by what it replaces or makes needless. A part of a new kind may raise it,
in a commit that says by how much and why."""


def test_the_project_stays_as_small_as_it_is() -> None:
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    num_statements = sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes)
    assert num_statements <= MAX_STATEMENTS


def is_text(node: ast.AST) -> bool:
    """Whether a statement is nothing but a string: a docstring, of whatever it stands below."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
