import { compile } from 'svelte/compiler'
import { describe, expect, it } from 'vitest'

import { spelledOut } from '../build/spelled'

const OF = `<script lang="ts">
  let { a, b }: { a: string; b: string[] } = $props()
</script>
<svelte:head><title>{a}</title></svelte:head>
{#if a > b[0]}<p title="x {a}" class={a} data-id={a} style:left="{a}px" {...{}}>{a as string} {b.length}</p>{/if}
{#each b as one (one)}<input value={one} aria-label={one} />{@render piece(one)}{:else}{a}{/each}
{#snippet piece(c: string)}<text>{c}</text>{/snippet}`

const code = (await spelledOut().markup?.({ content: OF, filename: 'Of.svelte' }))?.code ?? ''

describe('what a component shows', () => {
  it('is spelled out, and nothing else is', () => {
    expect(code.match(/__readable\([^()]*\)/g)).toEqual([
      '__readable(a)', '__readable(a)', '__readable(a as string)', '__readable(b.length)', '__readable(one)', '__readable(a)', '__readable(c)',
    ])
    expect(code).toContain('<p title="x {__readable(a)}" class={a} data-id={a} style:left="{a}px"')
  })
  it('is a component still', () => expect(compile(code, { filename: 'Of.svelte', generate: 'client' }).js.code).toContain('__readable'))
})
