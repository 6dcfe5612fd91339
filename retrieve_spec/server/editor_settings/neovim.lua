-- Neovim 0.12 or newer: the language server, no plug-in. It starts a server where none answers; add '--model', 'NAME'.
vim.lsp.config('retrieve_spec', {
  cmd = { 'retrieve-spec', 'lsp', '--connect', 'http://127.0.0.1:8012' },
  root_markers = { '.git', 'pyproject.toml' },
})
vim.lsp.enable('retrieve_spec')
vim.lsp.inline_completion.enable()
vim.keymap.set('i', '<Tab>', function()
  if not vim.lsp.inline_completion.get() then
    return '<Tab>'
  end
end, { expr = true, desc = 'Take the inline completion' })
