/**
 * A made-up run in the shapes of docs/view.md, made from its index, so that 100,000 episodes cost nothing: hostile
 * texts, a branching episode of three agents and an outside model, one of 100,000 tokens, failures, no verdicts.
 */

/** Deterministic random numbers from a seed. */
export function random(seed) {
  let state = (seed * 2654435761 + 1013904223) >>> 0
  return () => {
    state = (state + 0x6d2b79f5) >>> 0
    let t = Math.imul(state ^ (state >>> 15), 1 | state)
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296
  }
}

export const HOSTILE = [
  '<img src=x onerror="window.hacked=1">',
  '</script><script>window.hacked=1</script>',
  '"><svg onload=window.hacked=1>',
  '<style>*{display:none}</style>',
  'javascript:window.hacked=1',
  '{@html "<b>x</b>"} {{7*7}} ${window.hacked=1}',
  '\u202egnitirw esrever',
  '<!-- <script>',
]

const START = 1795000000
const PER_STEP = 256
const TASKS = [
  'What is 17 * 23 + 4?',
  'A train leaves at 9:40 and arrives at 13:05. How many minutes does it take?',
  'Find all integers n with n^2 - 5n + 6 = 0.',
  'How many of the numbers from 1 to 100 are divisible by 3 but not by 5?',
  'Sort the list [4, 1, 9, 7] and give the median.',
  ...HOSTILE.slice(0, 2),
]

const LAYOUTS = ['one column', 'two columns', 'scanned']
/** Metadata fields of tasks. */
export const FIELDS = ['layout']

export const EPISODES = Number(process.env.EPISODES ?? 100_000)

export function id(index) {
  return `ep-${String(index).padStart(6, '0')}`
}

export function indexOf(episode) {
  const found = /^ep-(\d+)$/.exec(episode)
  return found && Number(found[1]) < EPISODES ? Number(found[1]) : null
}

/** An episode as an entry of a list. */
export function listed(i) {
  const r = random(i + 1)
  const step = Math.floor(i / PER_STEP) + 1
  const validation = i % PER_STEP > 239
  const special = { 0: 'branching', 1: 'long', 2: 'hostile', 3: 'failed' }[i]
  const skill = 0.25 + 0.6 * (1 - Math.exp(-step / 120))
  const failed = special === 'failed' || r() < 0.015
  const success = failed ? null : r() < skill
  const stop = failed ? (special ? 'judge_failed' : 'environment_failed') : r() < 0.04 ? 'truncated' : 'completed'
  const group = Math.floor(i / 8)
  const agents = special === 'branching' ? ['planner', 'solver', 'critic'] : special === 'hostile' ? [HOSTILE[0]] : ['solver']
  const turns = special === 'branching' ? 14 : special === 'long' ? 60 : special ? 3 : 2 + Math.floor(r() * 3)
  return {
    episode_id: id(i),
    group_id: `g-${group}`,
    task_id: `task-${group % 977}`,
    layout: LAYOUTS[group % 3],
    step,
    split: validation ? 'validation' : 'train',
    attempt: i % 8,
    time: START + i * 0.7,
    query: special === 'hostile' ? HOSTILE[1] : TASKS[group % TASKS.length],
    stop_reason: stop,
    reward: failed ? null : success ? 1 : Math.round(r() * 30) / 100,
    success,
    cause: failed ? (special ? 'JudgeError: … is no number' : 'ConnectionError: the environment closed the connection') : '',
    answer: special === 'hostile' ? HOSTILE[6] : failed ? '' : success ? '395' : '394', expected: '395', label: '', why: '',
    error: failed ? (special ? `JudgeError: ${HOSTILE[0]} is no number` : 'ConnectionError: the environment closed the connection') : '',
    seconds: 0.5 + r() * 6,
    retries: failed ? 2 : 0,
    agents,
    tools: special === 'hostile' ? [HOSTILE[2]] : r() < 0.6 ? ['calculator'] : [],
    turns,
    tokens: special === 'long' ? 72_000 : turns * 40,
    prompt_tokens: special === 'long' ? 30_000 : turns * 60,
    branches: special === 'branching' ? 6 : 1,
  }
}

const WORDS = (
  'the answer is then we add multiply first so that 17 23 391 4 395 because let us check it again step by step ' +
  'therefore x equals 42 . , : ( ) \n \n\n   \t naïve 日本 émoji 🙂 def return'
).split(/(?<= )/)

function pieces(r, n) {
  return Array.from({ length: n }, () => {
    const word = WORDS[Math.floor(r() * WORDS.length)].replace(' ', '')
    return r() < 0.08 ? `${word}\n` : r() < 0.85 ? ` ${word}` : word
  })
}

/** The turns of an episode, and their tokens. */
export function whole(i) {
  const row = listed(i)
  const r = random(i + 77)
  const turns = []
  const tokens = []
  const turn = (agent, continues, more = {}) => {
    const index = turns.length
    const long = i === 1
    const [n, m] = [long ? 500 : 12 + Math.floor(r() * 60), long ? 1200 : 16 + Math.floor(r() * 50)]
    const [texts, said] = [pieces(r, n), pieces(r, m)]
    if (i === 2) HOSTILE.forEach((bad, k) => ((texts[k] = bad), (said[k] = bad)))
    const before = continues === null ? 0 : turns[continues].prompt_tokens + turns[continues].response_tokens
    const call = r() < 0.4 || more.call
    const reply = { role: 'assistant', content: said.join('') }
    if (call) {
      reply.tool_calls = [
        { id: `call_${index}`, type: 'function', function: { name: i === 2 ? HOSTILE[2] : 'calculator', arguments: JSON.stringify({ expression: i === 2 ? HOSTILE[0] : '17 * 23 + 4', precision: 10 }) } },
      ]
    }
    if (index % 3 === 0) reply.reasoning_content = `First I should think about it.\n${pieces(r, 30).join('')}`
    const last = continues === null ? null : turns[continues].reply
    const request =
      continues === null
        ? [
            { role: 'system', content: `You are the ${agent}. Answer in a box.` },
            { role: 'user', content: row.query },
            ...(more.retold ? Array.from({ length: 6 }, (_, k) => ({ role: k % 2 ? 'user' : 'assistant', content: texts.slice(k, k + 9).join('') })) : []),
          ]
        : last.tool_calls
          ? [{ role: 'tool', tool_call_id: last.tool_calls[0].id, name: 'calculator', content: i === 2 ? HOSTILE[1] : '{"result": 395, "exact": true}' }]
          : [{ role: 'user', content: texts.join('') }]
    turns.push({
      index, agent, role: agent === 'critic' ? 'judge' : 'player', policy: more.external ? '' : 'default', external: !!more.external,
      model: more.external ? 'gpt-outside-1' : null, trained: agent !== 'critic', lost: !!more.lost, continues,
      branch_reason: more.reason ?? '', approximation: '', finish_reason: more.finish ?? 'stop', policy_version: row.step - 1,
      prompt_tokens: before + n, response_tokens: m, request,
      tools: index === 0 ? [{ type: 'function', function: { name: 'calculator', description: 'Computes.', parameters: { type: 'object' } } }] : null,
      reply,
    })
    if (more.external) return index
    const credited = row.split === 'train' && row.reward !== null && agent !== 'critic' && !more.lost
    const logprobs = said.map(() => (r() < 0.6 ? -r() * 0.1 : -Math.exp(r() * 4 - 2)))
    tokens.push({
      index,
      prompt: { ids: texts.map((_, k) => 1000 + ((k * 37) % 5000)), texts: index % 2 ? texts.map((t, k) => (k % 17 === 5 ? '' : t)) : texts },
      response: {
        ids: said.map((_, k) => 2000 + ((k * 91) % 9000)), texts: said, logprobs,
        trained: said.map((_, k) => (credited && !(more.partial && k < 8) ? 1 : 0)),
        trainer_logprobs: credited ? logprobs.map((v, k) => (more.partial && k < 8 ? null : v + (r() - 0.5) * 0.02)) : null,
      },
      advantage: credited ? 0.87 : null,
      sample: credited ? 0 : null,
    })
    return index
  }
  if (i === 0) {
    let plan = turn('planner', null)
    let solve = turn('solver', null, { call: true })
    solve = turn('solver', solve)
    const critic = turn('critic', null, { external: true })
    plan = turn('planner', plan, { partial: true })
    const fork = solve
    solve = turn('solver', fork, { call: true })
    const other = turn('solver', fork, { finish: 'length' })
    turn('critic', critic, { external: true })
    plan = turn('planner', null, { reason: 'history_rewritten', retold: true })
    solve = turn('solver', solve)
    turn('solver', other, { lost: true })
    plan = turn('planner', plan)
    solve = turn('solver', null, { reason: 'tools_changed', retold: true })
    turn('solver', solve)
  } else {
    let before = null
    for (let k = 0; k < row.turns; k++) before = turn(row.agents[0], before)
  }
  const inner = new Set(turns.map((t) => t.continues))
  const samples = turns
    .filter((t) => !inner.has(t.index) && !t.external && t.trained && row.reward !== null && row.split === 'train')
    .map((leaf, sample) => {
      const path = []
      for (let at = leaf; at; at = at.continues === null ? null : turns[at.continues]) path.unshift(at.index)
      return {
        sample, step: row.step, agent: leaf.agent, policy: 'default', advantage: row.reward > 0.5 ? 0.87 : -0.62, token_weight: 1 / 8,
        reward: row.reward, trained_tokens: 120, policy_version: row.step - 1, turns: path,
      }
    })
  const episode = {
    ...row,
    reward_source: row.reward === null ? '' : 'judge',
    rewards: i === 0 ? { planner: 1, solver: 0.4 } : null,
    task: { init_messages: [], env_type: '', metadata: { answer: '395', note: i === 2 ? HOSTILE[1] : 'x' } },
    output: { response: turns.at(-1)?.reply.content.slice(0, 80) },
    metrics: { boxed: 1, timeout: 0, [i === 2 ? HOSTILE[0] : 'format']: 0.5 },
    turns,
    samples,
    failure:
      row.reward === null
        ? { what: 'The judge failed', why: row.error, advice: 'Run the judge on this episode: astuner replay RUN EPISODE --judge' }
        : null,
  }
  return { episode, tokens: { has_text: true, note: '', turns: tokens } }
}

export function metricsAt(step) {
  const r = random(step + 5)
  const skill = 0.25 + 0.6 * (1 - Math.exp(-step / 120))
  const row = {
    step, time: START + step * 60, 'reward/mean': skill + (r() - 0.5) * 0.15, 'success/mean': skill + (r() - 0.5) * 0.12,
    loss: (r() - 0.5) * 0.02, pg_loss: (r() - 0.5) * 0.02, 'kl/mismatch_mean': 0.0006 + r() * 0.0003, 'kl/ref': step * 1e-4 * (0.8 + r() * 0.4),
    entropy: 0.9 * Math.exp(-step / 200) + r() * 0.05, 'response_length/mean': 180 + step * 0.3 + r() * 20, 'throughput/tokens_per_s': 3200 + r() * 500,
    grad_norm: 0.3 + r(), lr: 1e-6, 'clip_frac/high': r() * 0.02, 'adv/zero_group_frac': 0.2 + r() * 0.2, 'time/step': 55 + r() * 8,
    'rollout/episodes': 256, [`workflow/${HOSTILE[0]}`]: r(),
  }
  const rows = [row]
  if (step % 10 === 0) {
    const p = skill - 0.03 + (r() - 0.5) * 0.04
    const slices = LAYOUTS.flatMap((layout, k) => {
      const at = `val/slice/layout/${layout.replace(' ', '_')}`
      return [[`${at}/success`, k === 2 ? 0.6 - p / 3 : p], [`${at}/reward`, p], [`${at}/tasks`, 42]]
    })
    rows.push({
      step, time: row.time + 1, 'val/success': p, 'val/success_ci_low': p - 0.06, 'val/success_ci_high': p + 0.06,
      'val/reward/mean': p + 0.02, 'val/tasks': 128, ...Object.fromEntries(slices),
    })
  }
  return rows
}

export const ALARMS = [
  { step: 31, time: START + 1860, rule: 'zero_reward_variance', severity: 'warning', message: '71 % of the groups of step 31 have the same reward throughout.', advice: 'Raise rollout.num_repeat, or take tasks that the model solves sometimes.' },
  { step: 204, time: START + 12240, rule: 'entropy_collapse', severity: 'error', message: `Entropy fell to 0.04 nats. ${HOSTILE[0]}`, advice: 'Lower the learning rate, or add algorithm.entropy_coeff.' },
]

/** The facts of the report at a step. */
export function verdict(step) {
  const validations = Array.from({ length: Math.floor(step / 10) }, (_, i) => metricsAt(10 * (i + 1))[1]).map((row) => ({
    step: row.step, success: row['val/success'], reward: row['val/reward/mean'], tasks: 128,
  }))
  const [before, after] = [validations[0], validations.at(-1)]
  if (before === after) return { verdict: { word: 'not measured', text: 'Not measured: no validation after training', level: 'warning' }, held_out: null }
  const finding = 'layout=scanned fell from 23/42 to 14/42 (p = 0.03, corrected for 3 slices)'
  return {
    verdict: { word: 'learned', text: `Learned: held-out success rose, 128 tasks; ${finding}`, level: 'good' },
    held_out: { before, after, best: validations.toSorted((a, b) => b.success - a.success)[0], difference: { measure: 'success', tasks: 128 } },
    alarms: ALARMS.map(({ rule }, i) => ({ rule, current: i > 0, last_step: step })),
    informative_episodes: [0, 2, 3].map((i) => ({ episode: id(i), reason: `${['branching', 'hostile', 'failed'][Math.min(i, 2)]} episode ${HOSTILE[i]}` })),
    next: { why: 'serve the best checkpoint', command: 'astuner promote math_agent.yaml --backbone local --checkpoint best' },
    slices: LAYOUTS.map((value, k) => ({ field: 'layout', value, metric: value.replace(' ', '_'), fell: k === 2, finding: k === 2 ? finding : '' })),
  }
}
