-- The unexpired records of workers, by name. ARGV: retention.

local records = {}
for _, name in ipairs(call('ZRANGEBYSCORE', K.workers, '(' .. seconds(now_us), '+inf')) do
  records[#records + 1] = valid_record(name)
end
return records
