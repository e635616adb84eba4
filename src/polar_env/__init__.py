"""Reinforcement learning on unmodified agent harnesses. This docstring is the map; a test holds it to the tree.

::

    conf/*.yaml -> config
                     |
     harness --HTTP--> proxy --CallRecord--> capture --sealed ledger--> trajectory --+
        ^                |                                                           v
     sandbox             +-- engine (vLLM, scripted)            grade --> reward --> gym

A rollout is one pass through this line; nothing flows back. ``rollout`` is the only composer, ``gym`` the only door to
NeMo Gym, and the command line goes through the same two.

    src/polar_env/
      messages.py            messages and tools in OpenAI-Chat form
      fast_json.py           JSON of long texts and many ids, without loss. Pure
      verdict.py             what a grading found and noticed
      types.py               facts that cross rooms: CallRecord, Trajectory, Verdict, Outcome; frozen
      errors.py              failures, named by the boundary they crossed
      config.py              one frozen model per conf/ group; the only reader of the environment
      capture.py             the capture contract and the ledger: each call judged, appended once, sealed
      segment_log.py         the ledger's durable file: append-only frames, ids stored once
      frames.py              the frames of that file, with checksums. Pure
      conversation.py        what each call was asked, stored once. Pure
      continuation.py        which earlier call does a request carry on? Message for message. Pure
      prefix.py              which earlier call does a prompt continue? A tree of ids, each stored once. Pure
      records.py             a session's records: ids held once, whole again when they are read. Pure
      trajectory.py          records -> prefix DAG -> chains -> ids, loss mask, log-probs, holes. Pure
      joins.py               how each call's prompt joins the calls before it, in five classes. Pure
      digest.py              a chain of hashes over what a row delivers. Pure
      reward.py              the one table (outcome, verdict, holes) -> reward, masked. Pure
      steps.py               build steps as child processes, and locks between processes
      pythons.py             base interpreters, found on this machine or installed by uv
      control.py             a trainer's side of the fence: orders over HTTP
      capacity.py            what one process can hold: open files, and what is loaded out of collections
      bundle.py              what is kept of a rollout that did not complete
      named.py               names in a configuration -> harness presets, engines
      ending.py              what is known of a rollout so far, and the word that names how it ended
      rollout.py             the only composer: sandbox, proxy, harness, deadlines -> RolloutResult
      demo.py                the main job: a group per harness through NeMo Gym, and its table
      standalone.py          the proxy alone, one harness on any endpoint, a log read back
      verify.py              rows against the durable logs of their sessions
      recipe.py              a NeMo-RL recipe made ready for an installation, and checked
      submit.py              a job for Slurm, Ray or Kubernetes
      cli_values.py          what the command line takes: numbers within bounds, files, folders, the nearest word
      cli_training.py        polar recipe | submit
      cli.py                 polar demo | rollout | proxy | harness | rebuild | verify | export | dataset | check | ...
      proxy/                 model calls in, committed call records out
        sse.py               server-sent events: any chunking of bytes gives the same events
        render.py            what the wire APIs share: content, JSON text, the order of a streamed turn
        anthropic.py         Anthropic Messages
        chat.py              OpenAI Chat Completions
        responses.py         OpenAI Responses
        responses_stream.py  output items of a Responses answer, and the events that stream them
        gemini.py            Google generateContent
        gemini_stream.py     its parts, their signatures, and the chunks that stream both
        ask.py               a model call before it is sampled, and its record after. Pure
        attempts.py          one generation and the requests waiting for it: joined, replayed, held back
        limits.py            calls, turns and tokens a session may use
        steady.py            first prompts without day, kernel release and nonce. Pure
        call_ids.py          tool calls whose ids the engine gives twice, told apart. Pure
        threads.py           sub-agents that look the same on the wire, told apart. Pure
        session.py           one rollout's calls: retries, limits, records, the end
        control.py           a trainer's orders to the fence, with a secret of their own. No sockets
        server.py            moves bytes between aiohttp and sessions, decides nothing
      engine/                where a prompt becomes sampled tokens
        vllm.py              a stock vLLM server: exact ids and log-probs, one replica per session
        vllm_splice.py       the same server, given ids and read back through its own parsers
        vllm_wire.py         its chat completions as data: a body out, chunks in. Pure
        replicas.py          servers over HTTP: one replica per session, failures as typed errors
        nemo_rl.py           the vLLM workers of a NeMo-RL job: required prefixes, one sampling profile
        sglang.py            an SGLang server: ids, log-probs, input_ids for what carries on
        text.py              any chat API: words and no ids, to grade and to imitate
        scripted.py          policies in Python behind a real tokenizer and chat template
        scripts.py           what those policies say: fix, give up, do half
        patches.py           unified diffs as values, for the scripts
        splice.py            a prompt as the ids that exist and a rendering of what is new, proved per template
        tokenizer.py         tokenizer and template from a folder: messages and tools in, ids out
        fence.py             the gate before an engine whose weights change: pause, resume, abort, versions
        hold.py              time at the fence, which is nobody's budget
        ages.py              how many updates old the weights behind a token are. Pure
      harness/               real agent CLIs as values: install, launch, read
        install.py           pinned versions from the registry, once per store
        reading.py           event streams and request marks
        quiet.py             keeps an event stream short enough to read its ending
        claude_code.py       Claude Code
        codex.py             Codex CLI
        pi.py                Pi
        qwen_code.py         Qwen Code
        opencode.py          opencode
        gemini_cli.py        Gemini CLI
        mini_swe_agent.py    mini-swe-agent
        openhands.py         OpenHands SDK
        aider.py             Aider
        shell.py             any other command
      sandbox/               where a harness and a test run happen
        bubblewrap.py        NeMo Gym sandbox provider: no daemon, no image, no root
        bubble.py            one running bubblewrap sandbox: commands, files, listener, kill
        sandbox.py           any NeMo Gym provider behind one handle
        root.py              the root filesystem as bubblewrap arguments
        trees.py             host folders shown copy-on-write, and their removal
        spaces.py            its namespaces, held by descriptors: files outlive the agent
        netns.py             sockets of ours inside the sandbox's own network namespace: the proxy's listener
        egress.py            what a sandbox tried to reach besides its model. Pure but for the socket it reads
        bpf.py               classic BPF programs with labels. Pure
        enter.py             the helper that joins a sandbox's namespaces
        process.py           runs that helper: bytes in, capped bytes out
        limits.py            how much of the machine it may use
        cgroups.py           memory, processor and process limits, held by the kernel
        conformance.py       what any provider must do: check_sandbox
        janitor.py           removes what a shot process of ours leaves
        seccomp.py           the system-call filter
      tasks/                 a dataset row becomes a repository, an environment, an instruction
        rows.py              rows from parquet, JSONL, the hub, or our own
        fields.py            what the shapes of a row share: checked fields, the instruction. Pure
        swebench_rows.py     SWE-bench v5 rows. Pure
        tests_pass_rows.py   rows of your own: a command, and tests that must pass. Pure
        swegym_rows.py       SWE-Gym rows as rows of SWE-bench. Pure
        r2e_rows.py          R2E-Gym rows. Pure
        custom_rows.py       rows that name a grader of their own. Pure
        embedded_rows.py     tasks of our own, in the same row form
        prepare.py           once per task, cached, shared by its group
        sources.py           repository trees: sdist, git mirror, files in a row, embedded
        registry.py          sdists from the package registry, checked
        environment.py       the task's Python environment with pinned packages
        process.py           steps with a task's error and patience
        once.py              directories made once between all processes
        conda.py             what the official images were built from, read back
        harbor.py            Harbor and Terminal-Bench task folders
        harbor_prepare.py    their image named or built, or a simple Dockerfile served as a directory
      grade/                 what the harness left behind becomes a verdict
        patch.py             the change, extracted against a pristine git directory
        diff.py              git patches as data, read byte by byte
        review.py            what a patch says before it is run: refusals, flags. Pure
        hidden.py            the tests' files, made on the host and placed from outside
        phases.py            the official script as install, build and test; the log put together outside. Pure
        audit.py             what installing changed and left running
        trial.py             one run of a patch against test files, in a sandbox of its own
        right.py             what the row's own fix does here, measured once
        mutants.py           rewritings of a test that a right program fails. Pure
        canary.py            test files of which some must fail, and what the right fix does with them
        prove.py             a resolved patch runs again, with such tests; whose doing it is when it does not end
        grading.py           who grades a task: one of ours by name, or module:Class
        prewarm.py           what a task's first grading would measure, measured while agents work
        swebench.py          a patch becomes a verdict
        results.py           what other rows' tests printed, and what it decides. Pure
        report.py            the worker process around the swebench package
        harbor.py            a task folder: what its agent left becomes a verdict
        verifier.py          one run of its own verifier, and the reward that wrote
        tools.py             what an agent changed of the tools that its verifier will run. Pure
      gym/                   the only door to NeMo Gym
        environment.py       rollouts for a server: engine, proxy and queue; a valid row for every row
        rows.py              a finished rollout -> the row NeMo-RL trains on. Pure
        revive.py            a masked row made again of its session's log, once a verdict lets it train
        items.py             a model call as the output items of a row. Pure
        contract.py          NeMo-RL's rules for a row, as a gate. Pure
        flights.py           rollouts under way: joined, given up, cancelled, hurried
        groups.py            which rollouts belong together, and when the last have had their time. Pure
        orders.py            a trainer's orders to them, here or on workers. No sockets
        wire.py              rows as JSON, in pieces, beside other rollouts' calls
        workers.py           rollouts spread over the nodes of a Ray cluster
        metrics.py           what the server tells Prometheus
        dataset.py           tasks as the rows Gym and NeMo-RL read
        resources_server.py  the resources server `polar`
        agent.py             the agent `polar_agent`
        environment_server.py  the relay Gym 0.7 asks for
        venvs.py             lends Gym's servers our environment
        launch.py            start NeMo Gym with polar in it, collect rollouts
        lifeline.py          a server ends with the process that started it
        root/                the folders in which Gym looks for servers: shims and their configuration
      export/                finished rollouts as other trainers read them
        samples.py           rollouts from rows or session logs
        neutral.py           our own schema: every chain, whole
        nemo_rl.py           rows, judged
        trl.py               what TRL's rollout_func returns
        verl.py              verl's AgentLoopOutput
        slime.py             slime's Sample
        sft.py               conversations of accepted rollouts
        write.py             JSONL, Parquet, Arrow
"""
