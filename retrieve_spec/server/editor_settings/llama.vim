" vimrc, with llama.vim installed. The address is llama.vim's default; it stands here to be seen.
let g:llama_config = {
    \ 'endpoint_fim': 'http://127.0.0.1:8012/infill',
    \ 'endpoint_inst': 'http://127.0.0.1:8012/v1/chat/completions',
    \ }
