/**
 * The API with made-up data and the real headers, to work on the page without a run: `npm run mock`, then
 * `npm run dev`, or look at the built page here. PORT, EPISODES and SLOW (ms per answer) are taken from the environment.
 */
import { existsSync, readFileSync } from 'node:fs'
import { createServer } from 'node:http'
import { fileURLToPath } from 'node:url'

import { ALARMS, EPISODES, FIELDS, HOSTILE, id, indexOf, listed, metricsAt, verdict, whole } from './data.mjs'

const PORT = Number(process.env.PORT ?? 8181)
const SLOW = Number(process.env.SLOW ?? 0)
const STATIC = fileURLToPath(new URL('../../astuner_view/static/', import.meta.url))
const CSP =
  "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
  "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
const STEPS = Math.ceil(EPISODES / 256)
let live = 60
setInterval(() => live < TOTAL && live++, 2000)

const rows = Array.from({ length: EPISODES }, (_, i) => listed(i))
const runs = () => [
  run('live', 'math_agent_live', 'running', live),
  run('big', 'multi_agent_100k', 'ended', STEPS),
  run('bad', HOSTILE[0], 'stopped', 12),
  ...Array.from({ length: 24 }, (_, i) => run(`old${i}`, `sweep_lr_${i}_seed_${i % 3}`, 'ended', 40 + i)),
]

function run(key, name, state, step) {
  return {
    id: key, name, state, backbone: key === 'big' ? 'verl' : 'local', model: 'Qwen/Qwen2.5-0.5B-Instruct', step,
    total_steps: key === 'live' ? TOTAL : step, started: Date.now() / 1000 - 7200, updated: Date.now() / 1000 - (state === 'running' ? 2 : 5400),
    progress: progressOf(key), episodes: shownOf(key).length, reward: 0.71, success: 0.684, alarms: key === 'big' ? ALARMS.length : 0,
  }
}

const TOTAL = 400
function progressOf(key) {
  if (key !== 'live' || live >= TOTAL) return null
  const [phase, total] = [['rollout', 256], ['update', 0], ['validation', 128]][live % 3]
  return {
    time: Date.now() / 1000, phase, step: live + 1, total_steps: TOTAL, done: Math.round(total / 3), total,
    elapsed_seconds: live * 60, remaining_seconds: (TOTAL - live) * 60,
  }
}

function shownOf(key) {
  return key === 'big' ? rows : rows.slice(0, key === 'live' ? live * 256 : 2000)
}

function facets(shown) {
  const counted = (values) => {
    const n = new Map()
    for (const value of values) n.set(value, (n.get(value) ?? 0) + 1)
    return [...n].sort((a, b) => b[1] - a[1])
  }
  return {
    stop_reason: counted(shown.map((e) => e.stop_reason)), split: counted(shown.map((e) => e.split)),
    agent: counted(shown.flatMap((e) => e.agents)), tool: counted(shown.flatMap((e) => e.tools)),
    error: counted(shown.map((e) => e.error).filter(Boolean)), limit: [], step: [1, shown.at(-1).step], reward: [0, 1],
  }
}

const COLUMNS = { episode: 'episode_id', group: 'group_id', task: 'task_id', agent: 'agents', tool: 'tools', text: 'query' }
class Bad extends Error {}
function meets(e, condition) {
  const found = /^\s*(\w+)\s*(!=|>=|<=|=|>|<|~)(.*)$/s.exec(condition)
  if (!found) throw new Bad(`--where '${condition}': write a name, one of = != < <= > >= ~, and a value, e.g. reward>=0.5`)
  const [, name, op, value] = found
  const have = e[COLUMNS[name] ?? name]
  if (have === undefined) throw new Bad(`--where '${condition}': there is no '${name}'`)
  if (op === '~') return value.toLowerCase().split(/\s+/).every((word) => String(have).toLowerCase().includes(word))
  if (Array.isArray(have)) return have.includes(value) === (op === '=')
  if (value === 'none') return (have === null) === (op === '=')
  if (typeof have !== 'number') return (String(have) === value) === (op === '=')
  const than = Number(value)
  return { '=': have === than, '!=': have !== than, '<': have < than, '<=': have <= than, '>': have > than, '>=': have >= than }[op]
}
let cache = ['', []]
function asked(key, q) {
  const question = `${key} ${live} ${q}`.replace(/&?(offset|limit|episode)=[^&]*/g, '')
  if (cache[0] === question) return cache[1]
  const where = q.getAll('where')
  let found = shownOf(key).filter((e) => where.every((condition) => meets(e, condition)))
  const order = q.get('order') ?? 'written'
  if (order !== 'written') found = found.toSorted((a, b) => (a[order] ?? -1e9) - (b[order] ?? -1e9))
  if (q.get('desc') === '1') found = found.toReversed()
  cache = [question, found]
  return found
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null)
function summed(es) {
  const rewards = es.map((e) => e.reward).filter((v) => v !== null)
  const m = mean(rewards)
  return {
    episodes: es.length, scored: rewards.length, reward_mean: m, reward_min: Math.min(...rewards), reward_max: Math.max(...rewards),
    reward_std: m === null ? null : Math.sqrt(mean(rewards.map((v) => (v - m) ** 2))), success: mean(es.filter((e) => e.success !== null).map((e) => +e.success)),
    failed: es.length - rewards.length, seconds_max: Math.max(...es.map((e) => e.seconds)), tokens: es.reduce((a, e) => a + e.tokens, 0),
  }
}
const by = (es, key) => {
  const found = new Map()
  for (const e of es) found.has(e[key]) ? found.get(e[key]).push(e) : found.set(e[key], [e])
  return found
}

function api(parts, q) {
  if (parts.length === 1) return { runs: runs() }
  const of = runs().find((one) => one.id === parts[1])
  if (!of) return null
  const shown = shownOf(of.id)
  const [, , what, episode, more] = parts
  const [offset, limit] = [Number(q.get('offset') ?? 0), Number(q.get('limit') ?? 200)]
  if (!what) {
    return {
      ...of, config: 'astuner:\n  model:\n    path: Qwen/Qwen2.5-0.5B-Instruct\n  rollout:\n    num_repeat: 8\n    temperature: 1.0\n  # ' + HOSTILE[1] + '\n',
      certificate: { exact: true, turns: 1234, branches: { history_rewritten: 3 } }, summary: { reward: 0.71, seconds: 7200 },
      alarms: of.alarms ? ALARMS : [], facets: facets(shown), problems: [], files: { 'report.html': true, 'run.log': true, 'resolved.yaml': true },
    }
  }
  if (what === 'verdict') return verdict(of.step)
  if (what === 'fields') return { fields: FIELDS.map((field) => [field, [...by(shown, field)].map(([value, es]) => [String(value), es.length])]) }
  if (what === 'metrics') return { rows: Array.from({ length: of.step }, (_, i) => metricsAt(i + 1)).flat(), cursor: String(of.step), reset: true }
  if (what === 'steps') {
    const split = q.get('split')
    return { steps: [...by(shown.filter((e) => e.split === split), 'step')].map(([step, es]) => ({ step, split, groups: by(es, 'group_id').size, ...summed(es) })) }
  }
  if (what === 'groups') {
    const groups = [...by(asked(of.id, q), 'group_id').values()]
    return { total: groups.length, groups: groups.slice(offset, offset + limit).map((es) => ({ ...es[0], ...summed(es) })) }
  }
  if (what === 'position') {
    const index = asked(of.id, q).findIndex((e) => e.episode_id === q.get('episode'))
    return { index: index < 0 ? null : index }
  }
  if (what === 'episodes' && !episode) {
    const found = asked(of.id, q)
    return { total: found.length, offset, episodes: found.slice(offset, offset + limit) }
  }
  if (what === 'episodes') {
    const i = indexOf(episode)
    return i === null ? null : more === 'tokens' ? whole(i).tokens : whole(i).episode
  }
  return null
}

function follow(response, cursor) {
  response.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-store', 'Content-Security-Policy': CSP })
  const send = (event, data) => response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`)
  let at = Number(cursor)
  const timer = setInterval(() => {
    const fresh = []
    while (at < live) fresh.push(...metricsAt(++at))
    if (fresh.length) send('metrics', { rows: fresh, cursor: String(at), reset: false })
    send('status', { state: live < TOTAL ? 'running' : 'ended', step: live, episodes: live * 256, alarms: 0, updated: Date.now() / 1000, progress: progressOf('live') })
    if (live === 65) send('alarm', { ...ALARMS[1], step: 65 })
  }, 1000)
  response.on('close', () => clearInterval(timer))
}

const TYPES = { html: 'text/html; charset=utf-8', js: 'text/javascript', css: 'text/css', txt: 'text/plain' }
createServer((request, response) => {
  const url = new URL(request.url, 'http://localhost')
  const headers = { 'Content-Security-Policy': CSP, 'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer', 'Cache-Control': 'no-store' }
  const json = (status, data) => response.writeHead(status, { ...headers, 'Content-Type': 'application/json' }).end(JSON.stringify(data))
  if (url.pathname.startsWith('/api/')) {
    const parts = url.pathname.slice(5).split('/').map(decodeURIComponent)
    if (parts[2] === 'live') return follow(response, url.searchParams.get('cursor'))
    if (request.method === 'POST') {
      const row = rows[indexOf(parts[3])]
      return request.on('data', (data) => json(200, Object.assign(row, JSON.parse(data))))
    }
    return setTimeout(() => {
      try {
        const said = api(parts, url.searchParams)
        said === null ? json(404, { error: `there is nothing at ${url.pathname}` }) : json(200, said)
      } catch (e) {
        if (!(e instanceof Bad)) throw e
        json(400, { error: e.message })
      }
    }, SLOW)
  }
  const name = url.pathname === '/' ? 'index.html' : url.pathname.slice(1)
  if (name.includes('..') || !existsSync(STATIC + name)) return json(404, { error: 'no such file' })
  response.writeHead(200, { ...headers, 'Content-Type': TYPES[name.split('.').at(-1)] ?? 'application/octet-stream' }).end(readFileSync(STATIC + name))
}).listen(PORT, '127.0.0.1', () => console.log(`http://127.0.0.1:${PORT}/ · ${EPISODES} episodes, first ${id(0)}`))
