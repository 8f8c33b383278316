import 'uplot/dist/uPlot.min.css'
import './app.css'
import './tokens.css'

import { mount } from 'svelte'

import App from './App.svelte'
import type { Client } from './lib/client'
import { HttpClient } from './lib/http'
import { type Exported, MemoryClient } from './lib/memory'
import { runRoute } from './lib/routes'
import { router } from './lib/state.svelte'

/** Exported pages contain their data; the served page does not have this element. */
function client(): Client {
  const data: unknown = JSON.parse(document.getElementById('astuner-data')?.textContent ?? 'null')
  if (data === null) return new HttpClient()
  const exported = data as Exported
  if (location.hash === '') router.replace(runRoute(exported.run.id)) // an exported page has one run
  return new MemoryClient(exported)
}

const target = document.getElementById('app')
if (!target) throw new Error('index.html has no element with the id app')
mount(App, { target, props: { client: client() } })
