import 'uplot/dist/uPlot.min.css'
import './app.css'
import './tokens.css'

import { mount } from 'svelte'

import App from './App.svelte'
import type { Client } from './lib/client'
import { HttpClient } from './lib/http'
import { type Exported, MemoryClient } from './lib/memory'

/** The exported page holds its data; the served one has no such element. */
function client(): Client {
  const data: unknown = JSON.parse(document.getElementById('astuner-data')?.textContent ?? 'null')
  return data === null ? new HttpClient() : new MemoryClient(data as Exported)
}

const target = document.getElementById('app')
if (!target) throw new Error('index.html has no element with the id app')
mount(App, { target, props: { client: client() } })
