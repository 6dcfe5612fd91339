require('minuet').setup {
  provider = 'openai_fim_compatible',
  n_completions = 1,
  context_window = 4096,
  throttle = 0,
  debounce = 100,
  virtualtext = { auto_trigger_ft = { '*' }, keymap = { accept = '<A-A>', accept_line = '<A-a>' } },
  provider_options = {
    openai_fim_compatible = {
      name = 'retrieve-spec',
      end_point = 'http://127.0.0.1:8012/v1/completions',
      model = 'retrieve-spec-qwen2.5-coder-reference',
      api_key = 'TERM', -- any variable that is set; the server asks for no key on this machine
      optional = { max_tokens = 64 },
    },
  },
}
