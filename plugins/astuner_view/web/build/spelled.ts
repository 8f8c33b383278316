/**
 * Any displayed text may be untrusted. This plugin wraps every expression in markup, and in attributes that are read
 * aloud or shown as tooltips, in `readable`.
 */
import { parse, type PreprocessorGroup } from 'svelte/compiler'

const SHOWN = ['title', 'aria-label', 'placeholder', 'alt']
const IMPORT = "import { readable as __readable } from '/src/lib/tokens.ts'"

export function spelledOut(): PreprocessorGroup {
  return {
    name: 'astuner-spelled-out',
    markup: ({ content, filename }) => {
      const found: { start: number; end: number }[] = []
      look(parse(content, { modern: true, ...(filename ? { filename } : {}) }).fragment, found)
      let code = content
      for (const { start, end } of found.sort((a, b) => b.start - a.start)) {
        code = `${code.slice(0, start)}__readable(${code.slice(start, end)})${code.slice(end)}`
      }
      if (found.length === 0) return { code }
      if (!code.includes('<script lang="ts">')) throw new Error(`${filename}: it shows something, and has no script`)
      return { code: code.replace('<script lang="ts">', `<script lang="ts">${IMPORT}`) }
    },
  }
}

interface Node {
  type?: string
  name?: string
  expression?: { start: number; end: number }
}

function look(node: unknown, found: { start: number; end: number }[]): void {
  if (typeof node !== 'object' || node === null) return
  const { type, name, expression } = node as Node
  if (type === 'ExpressionTag' && expression) found.push(expression)
  else if (type?.endsWith('Directive') || (type === 'Attribute' && !SHOWN.includes(name ?? ''))) return
  else for (const part of Object.values(node)) look(part, found)
}
