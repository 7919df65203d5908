-- A page of the files or batches of a tenant. ARGV: retention, 'files' or 'batches', tenant, id after which the page
-- begins or '', maximum number, 'asc' or 'desc', purpose or '' for any. Returns the hashes, each after its id. Reads
-- at most SCANNED entries; the last item is '' or the id at which the reading ended because of that.

local SCANNED = 1000
local kind, tenant, after, limit, purpose = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[7]
local index = (kind == 'files' and K.files or K.batch_index) .. tenant
local prefix = kind == 'files' and K.file or K.batch
local ids
if ARGV[6] == 'asc' then
  ids = call('ZRANGEBYLEX', index, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, SCANNED)
else
  ids = call('ZREVRANGEBYLEX', index, after == '' and '+' or '(' .. after, '-', 'LIMIT', 0, SCANNED)
end

local found = {}
for _, id in ipairs(ids) do
  if #found >= 2 * limit then
    found[#found + 1] = ''
    return found
  end
  local fields = call('HGETALL', prefix .. id)
  if #fields == 0 then
    -- Expired.
    call('ZREM', index, id)
  elseif purpose == '' or call('HGET', prefix .. id, 'purpose') == purpose then
    found[#found + 1] = id
    found[#found + 1] = fields
  end
end
found[#found + 1] = #ids == SCANNED and ids[#ids] or ''
return found
