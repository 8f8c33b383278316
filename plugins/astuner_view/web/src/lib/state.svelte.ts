/** State shared by all pages: route, theme, and the list an episode was opened from. */
import type { Query } from './api'
import { above, episodesRoute, format, parse, type Route } from './routes'

class Router {
  route: Route = $state.raw(parse(location.hash))
  /** Query of the last list, to move to the next episode and back to its row. */
  private list: (Query & { run: string }) | null = null

  /** The last viewed episode. */
  lastEpisode: { run: string; episode: string } | null = null

  constructor() {
    addEventListener('hashchange', () => this.follow())
    this.follow()
  }

  private follow(): void {
    this.route = parse(location.hash)
    if (this.route.page === 'episodes') this.list = this.route
    if (this.route.page === 'episode') this.lastEpisode = { run: this.route.run, episode: this.route.episode }
  }

  go(route: Route): void {
    location.hash = format(route)
    // set the route now, because the event arrives later
    this.follow()
  }

  /** Navigate without a history entry, for changes with every key. */
  replace(route: Route): void {
    history.replaceState(history.state, '', format(route))
    this.follow()
  }

  up(): void {
    const to = this.route.page === 'episode' ? this.listRoute(this.route.run) : above(this.route)
    if (to) this.go(to)
  }

  listQuery(run: string): Query {
    return this.list?.run === run ? this.list : { where: [], order: 'written', desc: false }
  }

  listRoute(run: string): Route {
    const { where, order, desc } = this.listQuery(run)
    return episodesRoute(run, { where, order, desc })
  }
}

export const THEMES = ['auto', 'light', 'dark'] as const
export type Theme = (typeof THEMES)[number]
const THEME = 'astuner-theme'

class Look {
  theme: Theme = $state('auto')
  private readonly system = matchMedia('(prefers-color-scheme: dark)')
  private systemDark = $state(this.system.matches)
  dark = $derived(this.theme === 'dark' || (this.theme === 'auto' && this.systemDark))

  constructor() {
    this.theme = THEMES.find((theme) => theme === remembered(THEME)) ?? 'auto'
    this.system.addEventListener('change', () => {
      this.systemDark = this.system.matches
      this.show()
    })
    this.show()
  }

  next(): void {
    this.theme = THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length] as Theme
    remember(THEME, this.theme)
    this.show()
  }

  private show(): void {
    document.documentElement.dataset['theme'] = this.dark ? 'dark' : 'light'
  }
}

/** A stored value; null if the browser does not store values, as for some pages opened from a file. */
export function remembered(name: string): string | null {
  try {
    return localStorage.getItem(name)
  } catch (e) {
    if (e instanceof DOMException) return null
    throw e
  }
}

export function remember(name: string, value: string): void {
  try {
    localStorage.setItem(name, value)
  } catch (e) {
    if (!(e instanceof DOMException)) throw e
  }
}

export const router = new Router()
export const look = new Look()
