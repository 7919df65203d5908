-- Appends a message to the log of a task and publishes it. The JSON has the same bytes as `messages.encode` writes.
-- token: digits, or '' for an end. text: a JSON string. members: further JSON members, or ''.

local function append(id, seq, token, text, index, members)
  local log, entry = K.log .. id, '0-' .. (seq + 1)
  if token == '' then
    call('HSET', K.run .. id, 'ended:' .. index, 1)
    call('XADD', log, entry, 'x', text, 'i', index, 'm', members)
    token = 'null'
  elseif members ~= '' then
    call('XADD', log, entry, 't', token, 'x', text, 'i', index, 'm', members)
  elseif index == '0' then
    call('XADD', log, entry, 't', token, 'x', text)
  else
    call('XADD', log, entry, 't', token, 'x', text, 'i', index)
  end
  if members ~= '' then
    members = ',' .. members
  end
  call('PUBLISH', K.channel .. id, '{"v":1,"id":"' .. id .. '","seq":' .. seq .. ',"index":' .. index
    .. ',"token":' .. token .. ',"text":' .. text .. members .. '}')
end
