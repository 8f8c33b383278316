/**
 * A long list that loads only visible blocks. Invariant: row i is the server's row i or not loaded; blocks of an
 * earlier query are never mixed in.
 */

export const BLOCK = 200
/** Maximum number of blocks in memory: 12,000 rows. */
const KEPT = 60

export interface Page<T> {
  total: number
  rows: T[]
}

export type Fetch<T> = (offset: number, limit: number) => Promise<Page<T>>

export class Paged<T> {
  total = $state(0)
  /** The first block is loaded. */
  ready = $state(false)
  error = $state('')
  /** Counts loaded blocks, so that rows are read again. */
  private version = $state(0)
  private blocks = new Map<number, T[]>()
  private asked = new Set<number>()
  private readonly fetch: Fetch<T>
  private stopped = false

  constructor(fetch: Fetch<T>) {
    this.fetch = fetch
    void this.load(0)
  }

  /** A row, or undefined until it is loaded. Reactive in effects and templates. */
  row(index: number): T | undefined {
    void this.version
    return this.blocks.get(Math.floor(index / BLOCK))?.[index % BLOCK]
  }

  /** Load missing rows of `from` … `to`. */
  need(from: number, to: number): void {
    const last = Math.floor(Math.min(to, this.total - 1) / BLOCK)
    for (let block = Math.floor(Math.max(from, 0) / BLOCK); block <= last; block++) {
      if (!this.blocks.has(block)) void this.load(block)
    }
  }

  stop(): void {
    this.stopped = true
  }

  private async load(block: number): Promise<void> {
    if (this.asked.has(block) || this.blocks.has(block)) return
    this.asked.add(block)
    try {
      const page = await this.fetch(block * BLOCK, BLOCK)
      if (this.stopped) return
      this.total = page.total
      this.blocks.set(block, page.rows)
      for (const old of this.blocks.keys()) {
        if (this.blocks.size <= KEPT) break
        this.blocks.delete(old)
      }
      this.error = ''
    } catch (e) {
      if (!this.stopped) this.error = e instanceof Error ? e.message : String(e)
    } finally {
      this.asked.delete(block)
      if (!this.stopped) {
        this.ready = true
        this.version++
      }
    }
  }
}
